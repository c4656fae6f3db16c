"""An estimate as a page: its data (``data.page_data``), charts (``charts.js``, ``style.css``) and the one-file report
(``one_file``). The page of ``serve`` uses the same charts."""
