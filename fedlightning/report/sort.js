// Sorting by a click on a column's title. The page says everything without this.
"use strict";
for (const table of document.querySelectorAll("table")) {
  const titles = table.tHead.rows[table.tHead.rows.length - 1].cells;
  [...titles].forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const up = title.getAttribute("aria-sort") === "descending";
      for (const other of titles) other.removeAttribute("aria-sort");
      title.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        return "value" in cell.dataset ? parseFloat(cell.dataset.value) : cell.textContent.trim();
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1; // what has no value stands last
        const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
