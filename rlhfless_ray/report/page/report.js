"use strict";
// Draws the charts of the page: fills colour names with the palette of the current theme.
(() => {
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const charts = read("charts"), leases = read("leases");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function palette() {
    const style = getComputedStyle(document.documentElement);
    return (name, opacity = 1) => {
      const hex = style.getPropertyValue("--" + name).trim() || "#888888";
      if (opacity === 1) return hex;
      const [r, g, b] = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
      return `rgba(${r},${g},${b},${opacity})`;
    };
  }

  function coloured(value, colour) {
    if (typeof value === "string") {
      const match = /^@(\w+)(?:\/([\d.]+))?$/.exec(value);
      return match ? colour(match[1], match[2] ? +match[2] : 1) : value;
    }
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(item => coloured(item, colour));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, colour)]));
    return value;
  }

  function layoutOf(chart, colour) {
    const axis = { gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line"), automargin: true, exponentformat: "power" };
    const named = (given, standoff) => ({ ...axis, ...given, title: { text: given?.title || "", standoff, font: { size: 12, color: colour("muted") } } });
    const shown = chart.data.filter(trace => trace.showlegend !== false && trace.name).length > 1;
    const layout = {
      ...chart.layout, height: chart.height, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif", size: 12, color: colour("ink") },
      margin: { l: 8, r: 12, t: shown ? 30 : 8, b: 8 }, hovermode: chart.layout.hovermode || "x unified", showlegend: shown,
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: { size: 12, color: colour("muted") }, traceorder: "normal" },
      hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 }, align: "left", namelength: -1 },
      xaxis: { showgrid: false, rangemode: "tozero", ...named(chart.layout.xaxis || { title: "step" }, 6) },
      yaxis: named(chart.layout.yaxis, 10), dragmode: "zoom",
    };
    if (!chart.layout.xaxis) {  // steps: whole numbers, and the same range in every chart
      const last = Math.max(...chart.data.map(trace => +trace.x[trace.x.length - 1] || 0));
      layout.xaxis.tickformat = ",d";
      if (last <= 10) layout.xaxis.dtick = 1;
      if (last > 0 && chart.data[0].type === "scatter") layout.xaxis.range = [0, last];
    }
    if (chart.layout.yaxis2) { layout.yaxis2 = named(chart.layout.yaxis2, 10); layout.xaxis.anchor = "y2"; }
    return layout;
  }

  async function draw(element) {
    const chart = charts[element.dataset.chart], colour = palette();
    try {
      await Plotly.react(element, coloured(chart.data, colour), layoutOf({ ...chart, layout: coloured(chart.layout, colour) }, colour), {
        responsive: true, displaylogo: false, displayModeBar: false,
      });
    } catch (error) {
      element.textContent = "This chart could not be drawn: " + error.message;
    }
  }

  async function drawAll() {
    for (const element of document.querySelectorAll(".plot")) {
      await draw(element);
      await new Promise(resolve => setTimeout(resolve));  // the page stays responsive in between
    }
  }
  if (leases) drawGantt(document.getElementById("gantt"), leases, palette, dark);
  dark.addEventListener("change", drawAll);
  drawAll();
})();
