// What a test asks of the page once a browser has laid it out.
addEventListener("load", () => {
  const page = document.documentElement.dataset;
  const shown = [...document.querySelectorAll("figure svg")].filter((svg) => {
    const box = svg.getBoundingClientRect();
    return box.width > 0 && box.height > 0;
  });
  page.figures = shown.length;
  page.requested = performance.getEntriesByType("resource").length;
});
