// The answers follow the fields while they are typed; without scripts the button does the same.
"use strict";
const form = document.querySelector("form");
const answers = document.querySelector("#answers");
let waiting = null, asked = 0;

async function ask() {
  const number = ++asked;
  const query = "?" + new URLSearchParams(new FormData(form));
  try {
    const response = await fetch("/" + query);
    const text = await response.text();
    if (number !== asked) return; // A later question is under way.
    if (!response.ok) throw new Error(text);
    const page = new DOMParser().parseFromString(text, "text/html");
    answers.innerHTML = page.querySelector("#answers").innerHTML;
    history.replaceState(null, "", "/" + query);
  } catch (error) {
    if (number === asked) answers.textContent = "No answer: " + error.message + ". Is shardwise explore still running?";
  }
}

form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(ask, 200); });
form.addEventListener("submit", event => { event.preventDefault(); clearTimeout(waiting); ask(); });
document.documentElement.classList.add("js");
