"""An estimate as a page: what it draws (``data.page_data``), how it is drawn (``charts.js``, ``style.css``), and all of
it in one file (``one_file``). The page of ``serve`` draws with the same files."""
