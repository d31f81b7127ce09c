// Draws the trees of a profile. Every text comes from `data` and reaches the page as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const KINDS = [
    { name: "kernel", hue: 24, saturation: 85, light: 68 },
    { name: "native", hue: 48, saturation: 88, light: 68 },
    { name: "managed", hue: 138, saturation: 42, light: 68 },
    { name: "remark", hue: 210, saturation: 8, light: 80 },
    { name: "garbage collector", hue: 290, saturation: 45, light: 76 },
    { name: "code", hue: 48, saturation: 60, light: 72 },
  ];
  const MANAGED = 2, REMARK = 3, COLLECTOR = 4;
  const GREW = { hue: 4, saturation: 75, light: 72 }, SHRANK = { hue: 214, saturation: 65, light: 76 };
  // Narrower frames are not drawn: nobody could see them.
  const NARROWEST = 0.7;

  function human(value, unit) {
    const scale = (steps) => {
      const [size, name] = steps.find(([size]) => Math.abs(value) >= size) || steps[steps.length - 1];
      const scaled = value / size;
      const digits = Number.isInteger(scaled) || Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
      return `${scaled.toFixed(digits)} ${name}`;
    };
    if (value === 0) return "0";
    if (unit === "nanoseconds") return scale([[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]]);
    if (unit === "bytes") return scale([[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
    const shown = Math.round(value).toLocaleString("en");
    return ["", "count", "sample", "samples", "unit", "units"].includes(unit) ? shown : `${shown} ${unit}`;
  }
  const signed = (text) => (text === "0" || text.startsWith("-") ? text : `+${text}`);
  // What a node is worth, in the unit of its sample type: of a difference with its sign.
  function worth(value, type) {
    const text = human(value * data.types[type].factor, data.types[type].unit);
    return isDifference(type) ? signed(text) : text;
  }
  const isDifference = (type) => data.types[type].busy_net.length + data.types[type].idle_net.length > 0;
  const percent = (part, whole) => (whole ? `${((part / whole) * 100).toFixed(1)} %` : "");

  // `Shop.Work.Burn<System.Int32>(System.Int32)` -> `Work.Burn<Int32>`: what fits into a frame; the line below has it all.
  function short(name) {
    const open = name.indexOf("(");
    const path = (open < 0 ? name : name.slice(0, open)).replace(/<.*>/, (args) => args.replace(/(?:[\w`]+\.)+/g, ""));
    const rest = open < 0 ? "" : name.slice(open).replace(/^\([^)]*\)/, "");
    const last = path.match(/[^.]+\.+[^.]+$/);
    return (last ? last[0] : path) + rest;
  }

  // Nodes are stored parents first; columns hold (node, value) pairs of the nodes that have one.
  function valued(type, idle) {
    const column = data.types[type];
    const sum = (...parts) => {
      const values = new Float64Array(data.parents.length);
      for (const pairs of parts) for (let i = 0; i < pairs.length; i += 2) values[pairs[i]] += pairs[i + 1];
      return values;
    };
    const widths = idle ? sum(column.busy, column.idle) : sum(column.busy);
    const nets = isDifference(type) ? (idle ? sum(column.busy_net, column.idle_net) : sum(column.busy_net)) : widths;
    return { widths, nets };
  }

  // The tree as it is drawn where `focus` takes `pixels`, the whole width: children that would be too narrow to see are one together.
  function tree(type, idle, focus, pixels) {
    const { widths, nets } = valued(type, idle);
    const more = new Map();
    for (let i = 0; i < data.more.length; i += 2) more.set(data.more[i], data.more[i + 1]);
    const callers = new Set();
    for (let id = focus; id; id = data.parents[id]) callers.add(id);
    const narrowest = (widths[focus] || widths[0]) * (NARROWEST / pixels);
    const nodes = [], rests = new Map();
    for (let id = 0; id < data.parents.length; id++) {
      if (widths[id] === 0 && id !== 0) continue;
      const parent = nodes[data.parents[id]];
      if (id !== 0 && !parent) continue;
      if (id !== 0 && ((widths[id] < narrowest && !callers.has(id)) || more.has(id))) {
        const rest = rests.get(parent) || { value: 0, net: 0, more: 0, any: id };
        rest.value += widths[id];
        rest.net += nets[id];
        rest.more += more.get(id) || 1;
        rests.set(parent, rest);
        continue;
      }
      const [name, module, kind] = data.frames[data.nodes[id]];
      const collector = id !== 0 && ((kind === REMARK && name === "Garbage Collector") || parent.kind === COLLECTOR);
      nodes[id] = { id, name, module, kind: collector ? COLLECTOR : kind, value: widths[id], net: nets[id], children: [] };
      if (id !== 0) parent.children.push(nodes[id]);
    }
    for (const [parent, rest] of rests) {
      if (rest.value < narrowest) continue;
      // A click on it is one on its caller, which then is wide enough for more of them.
      const name = `[${rest.more.toLocaleString("en")} more …]`;
      parent.children.push({ id: parent.id, name, module: "", kind: REMARK, value: rest.value, net: rest.net, children: [] });
    }
    return nodes[0];
  }

  function colour(node) {
    const isChange = isDifference(type) && node.data.net !== 0;
    const kind = isChange ? (node.data.net > 0 ? GREW : SHRANK) : KINDS[node.data.kind];
    if (node.highlight) return "#f04fb4";
    // Neighbours of one kind differ a little, the same function always looks the same.
    let hash = 0;
    for (const c of node.data.name) hash = (hash * 31 + c.codePointAt(0)) | 0;
    const shade = ((hash >>> 0) % 100) / 100 - 0.5;
    return `hsl(${kind.hue + shade * 10} ${kind.saturation}% ${kind.light + shade * 14}%)`;
  }

  let type = Math.max(0, data.types.findIndex((each) => each.name === data.default && each.busy.length));
  if (data.types.length && !data.types[type].busy.length) type = Math.max(0, data.types.findIndex((each) => each.busy.length));
  let chart = null;
  let total = 0;
  // The node that was clicked: a number that every sample type has in common. What is drawn may be one of its callers.
  let zoomed = 0;
  // The page itself zooms to what was clicked before.
  let settling = false;
  let width = { id: 0, name: "", value: 0 };

  const rootValue = (pairs) => (pairs[0] === 0 ? pairs[1] : 0);
  const idleShown = () => element("idle").checked;

  function describe(node) {
    if (!node) return "";
    const { name, module, kind } = node.data;
    const value = node.data.value;
    const own = node.data.net - d3.sum(node.data.children, (child) => child.net);
    const parts = [`${worth(node.data.net, type)} · ${percent(value, total)} of all`];
    if (isDifference(type)) parts[0] += " that changed";
    // Callers of what is zoomed to are wider than the picture.
    if (width.id && value <= width.value) parts.push(`${percent(value, width.value)} of ${width.name}, which is zoomed to`);
    if (node.parent) parts.push(`${percent(value, node.parent.data.value)} of caller`);
    parts.push(`self ${worth(own, type)}`);
    const place = node.depth === 0 ? "" : module ? ` [${module.replace(/^\[|\]$/g, "")}] (${KINDS[kind].name})` : ` (${KINDS[kind].name})`;
    return `${name}${place}: ${parts.join(" · ")}`;
  }

  const shown = (node) => (node.data.kind === MANAGED ? short(node.data.name) : node.data.name);

  function zoomTo(node) {
    width = { id: node.data.id, name: shown(node), value: node.data.value };
    element("reset").disabled = !node.data.id;
  }

  function search() {
    const term = element("search").value;
    element("matched").textContent = "";
    if (!chart) return;
    if (!term) { chart.clear(); return; }
    let matches;
    try { matches = new RegExp(term, "i"); } catch { element("matched").textContent = "not a regular expression"; return; }
    chart.setSearchMatch((node) => matches.test(node.data.name) || matches.test(node.data.module));
    chart.search(term);
  }

  function draw() {
    element("hover").textContent = "Point at a frame to see its value, click to zoom.";
    const host = element("chart");
    host.replaceChildren();
    host.hidden = false;
    const pixels = Math.max(320, host.clientWidth);
    const root = data.types.length ? tree(type, idleShown(), zoomed, pixels) : { value: 0 };
    total = root.value;
    host.hidden = total === 0;
    element("empty").hidden = total !== 0;
    chart = null;
    if (total !== 0) {
      chart = flamegraph.default()
        .width(pixels)
        .cellHeight(18)
        .transitionDuration(150)
        .minFrameSize(NARROWEST)
        .inverted(element("icicle").checked)
        .sort((a, b) => d3.descending(a.data.value, b.data.value) || d3.ascending(a.data.name, b.data.name))
        .resetHeightOnZoom(true)
        .selfValue(false)
        .getName(shown)
        .setLabelHandler(describe)
        .setColorMapper(colour)
        .setDetailsHandler((text) => { if (text) element("hover").textContent = text; })
        // Drawn anew: what was too narrow may be wide enough there.
        .onClick((node) => { if (settling) return; zoomed = node.data.id; setTimeout(draw, 0); })
        .setSearchHandler((_, sum) => { element("matched").textContent = `${percent(sum, width.value)} matched${width.id ? " of what is zoomed to" : ""}`; });
      const picture = d3.select(host).datum(root).call(chart).datum();
      zoomTo(picture);
      search();
      if (zoomed) {
        const nodes = new Map(picture.descendants().map((node) => [node.data.id, node]));
        const wanted = zoomed;
        let id = wanted;
        while (id && !nodes.has(id)) id = data.parents[id];
        if (id) {
          settling = true;
          chart.zoomTo(nodes.get(id));
          settling = false;
          zoomTo(nodes.get(id));
          search();
        }
        zoomed = wanted;
      }
    }
    for (const [index, button] of [...element("types").children].entries()) {
      button.setAttribute("aria-pressed", String(index === type));
      const each = data.types[index];
      const [busy, idle] = isDifference(index) ? [each.busy_net, each.idle_net] : [each.busy, each.idle];
      button.lastChild.textContent = worth(rootValue(busy) + (idleShown() ? rootValue(idle) : 0), index);
    }
  }

  for (const [index, each] of data.types.entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(Object.assign(document.createElement("b"), { textContent: each.name }), document.createElement("span"));
    button.hidden = !each.busy.length && !each.idle.length;
    button.addEventListener("click", () => { type = index; draw(); });
    element("types").append(button);
  }
  const isCodeShown = data.frames.some(([, , kind]) => KINDS[kind].name === "code");
  for (const kind of KINDS.filter((each) => each.name !== "code" || isCodeShown)) {
    const mark = document.createElement("i");
    mark.style.background = `hsl(${kind.hue} ${kind.saturation}% ${kind.light}%)`;
    const entry = document.createElement("span");
    entry.append(mark, kind.name);
    element("legend").append(entry);
  }
  element("about").textContent = data.about;
  element("loss").textContent = data.loss ? `Losses: ${data.loss}` : "";
  if (data.left_out) element("loss").append(` ${data.left_out} call paths too small to draw have no frame of their own.`);
  for (const comment of data.comments) element("comments").append(Object.assign(document.createElement("li"), { textContent: comment }));
  const without = data.types.filter((each) => !each.busy.length && !each.idle.length).map((each) => each.name);
  if (without.length) element("without").textContent = `Nothing was counted as ${without.join(", ")}.`;
  element("idle").checked = data.idle;
  element("idle-choice").hidden = data.types.every((each) => !each.idle.length);
  element("idle").addEventListener("change", draw);
  element("icicle").addEventListener("change", draw);
  element("reset").addEventListener("click", () => { zoomed = 0; draw(); });
  element("search").addEventListener("input", search);
  let resized = 0;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(draw, 200); });
  draw();
})();
