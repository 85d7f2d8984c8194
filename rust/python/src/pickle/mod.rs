//! The contents of a pickle, and of the index of a distributed checkpoint, as Python objects that do nothing.

mod convert;

use std::collections::HashSet;

use numpy::PyArray1;
use pyo3::{
    exceptions::PyMemoryError,
    prelude::*,
    types::{PyBytes, PyDict, PyList, PyString, PyTuple},
};
use shardwise_core::{
    dcp::Index,
    pickle::{Id, Pickle, Value},
};

use crate::errors::{ParseError, answer, detached, guard};
use convert::Converter;
pub(crate) use convert::{Persistent, Record};

/// Reads a pickle; nothing of it is imported or called.
///
/// `judge(name)` is asked once for each global whether it may be named, and may raise. `persistent` says whether the
/// container of the pickle may hold values.
#[pyfunction]
#[pyo3(signature = (data, judge, /, *, persistent = false))]
pub(crate) fn read_pickle<'py>(
    data: &Bound<'py, PyBytes>,
    judge: &Bound<'py, PyAny>,
    persistent: bool,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| {
        let py = data.py();
        let bytes = data.as_bytes();
        let pickle = detached(py, |poll| Pickle::new(bytes, poll))?;
        let free = HashSet::new();
        let names = judged(py, &pickle, judge, &free)?;
        Converter::new(py, &pickle, names, persistent, &free)?.value(py, pickle.root(), 0)
    })
}

/// Reads the index of a distributed checkpoint.
///
/// `judge(name)` is asked once for each global: true if it may be named anywhere, false if only below the attributes of
/// the outermost object that are not in `strict`; or it raises. Gives the tensors, as tuples of name, dtype, shape, first chunk, number of chunks, where its bounds begin, and whether its
/// chunks tile it; the objects, as tuples of name and place; the bounds of all chunks; the places of the chunks; the
/// places, as rows of file, offset and length; the files; and the attributes that are not in `strict`, or `None` where
/// they cannot be read.
#[pyfunction]
#[pyo3(signature = (data, judge, strict, /))]
pub(crate) fn read_dcp_index<'py>(
    data: &Bound<'py, PyBytes>,
    judge: &Bound<'py, PyAny>,
    strict: Vec<String>,
) -> PyResult<Bound<'py, PyAny>> {
    answer(data.py(), || {
        let py = data.py();
        let bytes = data.as_bytes();
        let pickle = detached(py, |poll| Pickle::new(bytes, poll))?;
        let free = free_attributes(&pickle, &strict);
        let names = judged(py, &pickle, judge, &free)?;
        let index = detached(py, |poll| Index::new(&pickle, poll))?;
        let tensors = PyList::empty(py);
        for tensor in &index.tensors {
            let dtype = format!("{}.{}", tensor.dtype.0, tensor.dtype.1);
            let shape = PyTuple::new(py, &tensor.shape)?;
            let place = (tensor.first, tensor.chunks, tensor.bounds, tensor.is_tiled);
            tensors.append((tensor.name, PyString::intern(py, &dtype), shape, place.0, place.1, place.2, place.3))?;
        }
        let objects = PyList::new(py, &index.objects)?;
        let mut places = Vec::new();
        places
            .try_reserve_exact(3 * index.places.len())
            .map_err(|_| PyMemoryError::new_err("no memory for the chunks of an index"))?;
        places.extend(index.places.iter().flat_map(|place| [place.file, place.offset, place.length]));
        let rest = PyDict::new(py);
        let mut converter = Converter::new(py, &pickle, names, false, &free)?;
        for (key, value) in root_attributes(&pickle) {
            let Value::Text(span) = pickle.value(key) else { continue };
            let name = String::from_utf8_lossy(pickle.bytes(span)).into_owned();
            if name != "state_dict_metadata" && name != "storage_data" {
                rest.set_item(name, converter.or_none(py, value, 0)?)?;
            }
        }
        Ok((
            tensors,
            objects,
            PyArray1::from_vec(py, index.bounds),
            PyArray1::from_vec(py, index.chunk_places),
            PyArray1::from_vec(py, places),
            PyList::new(py, &index.files)?,
            rest,
        ))
    })
}

/// The attributes of the outermost object.
fn root_attributes<'p>(pickle: &'p Pickle<'_>) -> impl Iterator<Item = (Id, Id)> + 'p {
    let state = match pickle.value(pickle.root()) {
        Value::Record(root) => pickle.record(root).state.map(|id| pickle.value(id)),
        _ => None,
    };
    let pairs = if let Some(Value::Dict(state)) = state { pickle.dict(state) } else { &[] };
    pairs.iter().copied()
}

/// The attributes of the outermost object that are not in `strict`.
fn free_attributes(pickle: &Pickle<'_>, strict: &[String]) -> HashSet<Id> {
    let is_strict = |key: Id| match pickle.value(key) {
        Value::Text(span) => strict.iter().any(|name| name.as_bytes() == pickle.bytes(span)),
        _ => true,
    };
    root_attributes(pickle).filter(|&(key, _)| !is_strict(key)).map(|(_, value)| value).collect()
}

/// The names of the globals, after asking about each.
fn judged(
    py: Python<'_>,
    pickle: &Pickle<'_>,
    judge: &Bound<'_, PyAny>,
    free: &HashSet<Id>,
) -> PyResult<Vec<Py<PyString>>> {
    let mut names = Vec::new();
    let mut unknown = HashSet::new();
    for (number, (module, name)) in pickle.globals().enumerate() {
        let (Ok(module), Ok(name)) = (str::from_utf8(module), str::from_utf8(name)) else {
            return Err(ParseError::new_err("names a global with text that is not UTF-8"));
        };
        let name = PyString::new(py, &format!("{module}.{name}"));
        if !judge.call1((&name,))?.extract::<bool>()? {
            unknown.insert(number as u32);
        }
        names.push(name.unbind());
    }
    if unknown.is_empty() {
        return Ok(names);
    }
    // An unknown global must lie below the free attributes only, not even where nothing leads to it.
    let mut strict_roots = vec![pickle.root()];
    if let Value::Record(root) = pickle.value(pickle.root())
        && let Some(state) = pickle.record(root).state
        && let Value::Dict(state) = pickle.value(state)
    {
        let record = pickle.record(root);
        strict_roots = vec![record.callee, record.arguments];
        strict_roots.extend(pickle.items(record).iter().flat_map(|&(key, value)| [key, value]));
        strict_roots.extend(pickle.elements(record));
        for &(key, value) in pickle.dict(state) {
            strict_roots.push(key);
            if !free.contains(&value) {
                strict_roots.push(value);
            }
        }
    }
    let (below_free, below_strict) =
        (reach(pickle, &free.iter().copied().collect::<Vec<_>>())?, reach(pickle, &strict_roots)?);
    for id in 0..pickle.len() {
        if let Value::Global(number) = pickle.value(id as Id)
            && unknown.contains(&number)
            && (below_strict[id] || !below_free[id])
        {
            let name = names[number as usize].bind(py).to_string();
            let name: String = name.chars().take(200).collect();
            return Err(ParseError::new_err(format!("names {name:?}, which is not supported here")));
        }
    }
    Ok(names)
}

fn reach(pickle: &Pickle<'_>, roots: &[Id]) -> PyResult<Vec<bool>> {
    pickle.reachable(roots).map_err(crate::errors::to_py)
}
