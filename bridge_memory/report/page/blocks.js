// A page of printed blocks: its charts, where it has some.
import { drawAll } from "./plots.js";

drawAll();
