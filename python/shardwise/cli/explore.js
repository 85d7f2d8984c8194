// The answers follow the fields while they are typed; without scripts the button does the same.
"use strict";
const form = document.querySelector("form");
const answers = document.querySelectorAll(".answer");
const trouble = document.querySelector("#trouble");
let waiting = null, isAsking = false, isStale = false;

// One question at a time: what is typed meanwhile is asked as one more question afterwards.
async function ask() {
  isStale = isAsking;
  if (isAsking) return;
  isAsking = true;
  const query = "?" + new URLSearchParams(new FormData(form));
  try {
    const response = await fetch("/" + query);
    const text = await response.text();
    const page = new DOMParser().parseFromString(text, "text/html");
    if (!response.ok) throw new Error(page.body.innerText.trim());
    page.querySelectorAll(".answer").forEach((answer, i) => {
      if (answers[i].innerHTML !== answer.innerHTML) answers[i].innerHTML = answer.innerHTML;
    });
    trouble.textContent = "";
    history.replaceState(null, "", "/" + query);
  } catch (error) {
    trouble.textContent = "No answer: " + error.message + ". Is shardwise explore still running?";
  }
  isAsking = false;
  if (isStale) ask();
}

form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(ask, 200); });
form.addEventListener("submit", event => { event.preventDefault(); clearTimeout(waiting); ask(); });
document.documentElement.classList.add("js");
