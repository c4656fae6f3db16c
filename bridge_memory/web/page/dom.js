// Elements from names, attributes and children. Text from a server or a file is never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  set(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, to] of Object.entries(value)) element.style.setProperty(name, to);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
}

export const $ = (id) => document.getElementById(id);

const GIB = 2 ** 30;
export const gib = (bytes, digits = 1) => (bytes / GIB).toFixed(digits);

export function parameters(count) {
  if (count >= 1e12) return `${(count / 1e12).toFixed(2)} T`;
  if (count >= 1e9) return `${(count / 1e9).toFixed(count >= 1e11 ? 0 : 1)} B`;
  return `${(count / 1e6).toFixed(0)} M`;
}

export function seconds(value) {
  if (value >= 100) return `${value.toFixed(0)} s`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${(value * 1000).toFixed(0)} ms`;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");

let quiet;
export function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("shown");
  clearTimeout(quiet);
  quiet = setTimeout(() => $("toast").classList.remove("shown"), 4000);
}

// A button; its class makes it plain text or the primary action.
export const button = (text, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, text);

// Replaces the children of `parent` and restores the focus (by data-focus).
export function fill(parent, ...children) {
  const at = parent.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  parent.replaceChildren(...children.flat().filter(Boolean));
  if (at) parent.querySelector(`[data-focus="${CSS.escape(at)}"]`)?.focus();
  parent.hidden = false;
}
