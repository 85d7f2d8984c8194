// Wide tables scroll within their own frames; the keyboard reaches those that have something to scroll.
const reach = () => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class])"))
    if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
    else frame.removeAttribute("tabindex");
};
addEventListener("load", reach);
addEventListener("resize", reach);
