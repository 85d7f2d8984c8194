//! `_core.RuleSet` and `_core.Pattern`.

use std::borrow::Cow;

use pyo3::{
    exceptions::PyValueError,
    intern,
    prelude::*,
    types::{PyBytes, PyString, PyTuple},
};
use shardwise_core::rules::{CharClass, MatchMode, Pattern as CorePattern, RuleSet as CoreRuleSet, SURROGATE};

use crate::{
    convert::strings,
    errors::{LayoutError, answer, guard, poll_holding, to_py},
    memory::room,
};

/// The bytes that translating a rule takes at most for each of its own.
const TRANSLATING: usize = 64;

/// The bytes that a search takes at most: for each byte of the rules, and in all, since the core limits what it keeps.
/// Each search may find states that none has found before.
const SEARCHING: usize = 16 << 10;
const SEARCHING_LIMIT: usize = 96 << 20;

/// The bytes that a search takes at most once the rules are compiled: the list of the states, of at most 16 MiB, grows to
/// twice its size. It is less than glibc maps apart, 32 MiB, which would take ten times as long as the search.
const FINDING_LIMIT: usize = 31 << 20;

/// Regular expressions that Python has accepted, searched for together.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct RuleSet {
    core: CoreRuleSet,
    /// The most bytes that a search may take.
    searching: usize,
}

#[pymethods]
impl RuleSet {
    /// `mode` is the name of a function of Python's `re`.
    #[new]
    #[pyo3(signature = (patterns, mode, /))]
    fn new(patterns: &Bound<'_, PyAny>, mode: &str) -> PyResult<Self> {
        guard(|| {
            let mode = match mode {
                "search" => MatchMode::Search,
                "match" => MatchMode::Match,
                "fullmatch" => MatchMode::FullMatch,
                other => {
                    return Err(PyValueError::new_err(format!("mode is {other:?}, not search, match or fullmatch")));
                }
            };
            let patterns = strings("patterns", patterns)?;
            let length: usize = patterns.iter().map(String::len).sum();
            room("the rules", length.saturating_mul(TRANSLATING).saturating_add(patterns.len().saturating_mul(64)))?;
            let searching = SEARCHING_LIMIT.min(length.saturating_add(16).saturating_mul(SEARCHING));
            Ok(Self { core: CoreRuleSet::new(&patterns, mode), searching })
        })
    }

    /// The positions of the patterns that only a backtracking search can find.
    fn backtracking<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let mut pending = None;
            let rest = self.core.backtracking(&mut || poll_holding(py, &mut pending));
            PyTuple::new(py, rest.map_err(|error| pending.unwrap_or_else(|| to_py(error)))?)
        })
    }

    /// The patterns that are too large, each as its position and the steps that its counted repetitions add.
    fn too_large<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, self.core.too_large()))
    }

    /// The positions of the patterns that match the path, and of those that Python's engine still has to try.
    #[pyo3(signature = (path, /))]
    fn find<'py>(&self, path: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
        answer(path.py(), || {
            let py = path.py();
            let text = &*text_of(path)?;
            // A path may be longer than the rules, and what is searched is a copy of it.
            let limit = if self.core.is_compiled_for(text) { FINDING_LIMIT } else { SEARCHING_LIMIT };
            room("the search", self.searching.min(limit).saturating_add(text.len().saturating_mul(16)))?;
            let mut pending = None;
            let found = classed(py, |class_of| self.core.find(text, class_of, &mut || poll_holding(py, &mut pending)))?;
            let found = found.map_err(|error| pending.unwrap_or_else(|| to_py(error)))?;
            Ok((PyTuple::new(py, found.matches)?, PyTuple::new(py, found.rest)?))
        })
    }
}

/// A regular expression that Python has accepted, whose matches are substituted.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Pattern {
    core: CorePattern,
}

#[pymethods]
impl Pattern {
    #[new]
    #[pyo3(signature = (pattern, /))]
    fn new(pattern: &str) -> PyResult<Self> {
        guard(|| {
            room("the pattern", SEARCHING_LIMIT.min(pattern.len().saturating_add(16).saturating_mul(SEARCHING)))?;
            CorePattern::new(pattern).map(|core| Self { core }).map_err(LayoutError::new_err)
        })
    }

    /// The matches in the path, each the span of the whole and of each group, in characters; `None` where only Python's
    /// engine can tell.
    #[pyo3(signature = (path, /))]
    fn matches<'py>(&self, path: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
        answer(path.py(), || {
            let text = text_of(path)?;
            room("the search", SEARCHING_LIMIT.saturating_add(text.len().saturating_mul(64)))?;
            classed(path.py(), |class_of| self.core.matches(&text, class_of))
        })
    }
}

/// Makes what these functions keep: see `lib`.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    without_surrogates(&PyString::new(py, ""))?;
    // Of no class, so that all are asked for.
    class_of(py, '€').map(drop)
}

/// The path as Rust has it.
fn text_of<'a>(path: &'a Bound<'_, PyString>) -> PyResult<Cow<'a, str>> {
    match path.to_str() {
        Ok(text) => Ok(Cow::Borrowed(text)),
        Err(_) => without_surrogates(path).map(Cow::Owned),
    }
}

/// The answer of `search`, which is given what `re` takes characters for.
fn classed<T>(py: Python<'_>, search: impl FnOnce(&mut dyn FnMut(char) -> CharClass) -> T) -> PyResult<T> {
    let mut failed = None;
    let found = search(&mut |c| {
        class_of(py, c).unwrap_or_else(|error| {
            failed = Some(error);
            CharClass::Other
        })
    });
    failed.map_or(Ok(found), Err)
}

/// The path with [`SURROGATE`] in the place of each lone surrogate.
fn without_surrogates(path: &Bound<'_, PyString>) -> PyResult<String> {
    let encoded = path.call_method1(intern!(path.py(), "encode"), ("utf-32-le", "surrogatepass"))?;
    let points = encoded.cast::<PyBytes>()?.as_bytes().chunks_exact(4);
    Ok(points.map(|p| char::from_u32(u32::from_le_bytes([p[0], p[1], p[2], p[3]])).unwrap_or(SURROGATE)).collect())
}

/// The class that `re` takes a character for: it asks the same tables as these methods.
fn class_of(py: Python<'_>, c: char) -> PyResult<CharClass> {
    let text = PyString::new(py, c.encode_utf8(&mut [0; 4]));
    let says = |method: &Bound<'_, PyString>| text.call_method0(method)?.is_truthy();
    Ok(if says(intern!(py, "isdecimal"))? {
        CharClass::Digit
    } else if says(intern!(py, "isalnum"))? {
        CharClass::Word
    } else if says(intern!(py, "isspace"))? {
        CharClass::Space
    } else {
        CharClass::Other
    })
}
