// What is illegible in the page as it is shown now: a list of sentences.
(() => {
  const problems = [], width = innerWidth;
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data;
  };
  const luminance = (colour) => {
    const [r, g, b] = [0, 1, 2].map((at) => {
      const value = colour[at] / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(rgba(one)), luminance(rgba(other))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgba(colour)[3] > 0) return colour;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const beneath = (text) => {  // the shape that the text's middle stands on, or the page
    const style = getComputedStyle(text);
    if (style.stroke !== "none") return style.stroke;
    const box = text.getBBox(), point = text.ownerSVGElement.createSVGPoint();
    point.x = box.x + box.width / 2;
    point.y = box.y + box.height / 2;
    let found = ground(text.ownerSVGElement);
    for (const shape of text.ownerSVGElement.querySelectorAll("rect, path, circle, polygon")) {
      if (text.compareDocumentPosition(shape) & Node.DOCUMENT_POSITION_FOLLOWING) break;
      const fill = getComputedStyle(shape).fill;
      if (fill !== "none" && shape.isPointInFill(point)) found = fill;
    }
    return found;
  };
  const hidden = (element) => element.closest("thead") && getComputedStyle(element.closest("thead")).position === "absolute";
  const said = (element) => `${element.tagName} ${JSON.stringify(element.textContent.trim().slice(0, 60))}`;

  if (document.scrollingElement.scrollWidth > width) problems.push(`the page is ${document.scrollingElement.scrollWidth} wide`);
  for (const element of document.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (!box.width || hidden(element)) continue;
    if (box.right > width + 1 || box.left < -1) problems.push(`${said(element)} leaves the window: ${box.left} to ${box.right}`);
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest("svg")) continue;
    const style = getComputedStyle(element), ratio = contrast(style.color, ground(element));
    if (ratio < 4.5) problems.push(`${said(element)} has contrast ${ratio.toFixed(2)}`);
    if (parseFloat(style.fontSize) < 12) problems.push(`${said(element)} is ${style.fontSize} high`);
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth) problems.push(`${said(element)} is cut off`);
  }
  let pictures = 0;
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    pictures += 1;
    const name = svg.getAttribute("aria-labelledby").split("-title")[0];
    const scale = frame.width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim());
    const boxes = texts.map((text) => text.getBoundingClientRect());
    texts.forEach((text, at) => {
      const style = getComputedStyle(text), size = parseFloat(style.fontSize) * scale, box = boxes[at];
      if (size < 10) problems.push(`${name}: ${said(text)} is ${size.toFixed(1)} px high`);
      const ratio = contrast(style.fill, beneath(text));
      if (ratio < 4.5) problems.push(`${name}: ${said(text)} has contrast ${ratio.toFixed(2)}`);
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2)
        problems.push(`${name}: ${said(text)} leaves the picture`);
      for (let other = 0; other < at; other += 1) {
        const across = Math.min(box.right, boxes[other].right) - Math.max(box.left, boxes[other].left);
        const down = Math.min(box.bottom, boxes[other].bottom) - Math.max(box.top, boxes[other].top);
        if (across > 1 && down > 4 * scale) problems.push(`${name}: ${said(text)} lies on ${said(texts[other])}`);
      }
    });
  }
  return { problems, pictures };
})()
