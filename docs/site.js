// Wide tables and pictures scroll within their own frames; the keyboard reaches those that have something to scroll.
const reach = () => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class]), .md-typeset p:has(> img)"))
    if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
    else frame.removeAttribute("tabindex");
};
addEventListener("load", reach);
addEventListener("resize", reach);
