// Before anything is painted: the reader's choice, else the system's. Files on disk may not be allowed to keep it.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("nsa_jax-report-theme");
  } catch (error) {
    /* not allowed */
  }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
