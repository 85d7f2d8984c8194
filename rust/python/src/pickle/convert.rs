//! The values of a pickle as Python objects, of which those that a pickle would make by calls do nothing.

use std::collections::HashSet;

use pyo3::{
    exceptions::{PyMemoryError, PyTypeError},
    prelude::*,
    types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple},
};
use shardwise_core::pickle::{Id, Pickle, Record as CoreRecord, Value};

use crate::errors::{ParseError, answer};

/// The most levels of values in one another; a value that contains itself is deeper than any.
const MAX_DEPTH: usize = 200;

/// The number of values that are converted between two looks for a signal.
const SIGNALS_EVERY: usize = 1 << 16;

/// A call that a pickle asks for and that was not made, or a global that it names.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Record {
    /// `module.name` of what would be called; `dict` and `set` for those whose keys are not all text or integers.
    #[pyo3(get)]
    name: Py<PyString>,
    /// The arguments of the call; `None` for a global that is not called.
    #[pyo3(get)]
    args: Option<Py<PyAny>>,
    /// The keyword arguments.
    #[pyo3(get)]
    kwargs: Option<Py<PyAny>>,
    /// The state that the result would be given.
    #[pyo3(get)]
    state: Option<Py<PyAny>>,
    /// The pairs that would be set on the result.
    #[pyo3(get)]
    items: Py<PyAny>,
    /// The values that would be appended to the result.
    #[pyo3(get)]
    elements: Py<PyAny>,
}

#[pymethods]
impl Record {
    fn __repr__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(format!("<Record {}>", self.name.bind(py).to_cow()?)))
    }
}

/// A placeholder for a value that the pickle's container holds.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Persistent {
    /// The key of the value in the container.
    #[pyo3(get)]
    id: Py<PyAny>,
}

#[pymethods]
impl Persistent {
    fn __repr__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok("<Persistent>"))
    }
}

/// Makes objects of the values of a pickle.
pub(super) struct Converter<'a> {
    pickle: &'a Pickle<'a>,
    names: Vec<Py<PyString>>,
    /// The object made of each value, so that what is shared stays shared and is not made twice.
    made: Vec<Option<Py<PyAny>>>,
    persistent: bool,
    free: &'a HashSet<Id>,
    nothing: Py<PyAny>,
    converted: usize,
}

impl<'a> Converter<'a> {
    pub(super) fn new(
        py: Python<'_>,
        pickle: &'a Pickle<'a>,
        names: Vec<Py<PyString>>,
        persistent: bool,
        free: &'a HashSet<Id>,
    ) -> PyResult<Self> {
        let mut made = Vec::new();
        let no_memory = |_| PyMemoryError::new_err("no memory for the values of a pickle");
        made.try_reserve_exact(pickle.len()).map_err(no_memory)?;
        made.resize_with(pickle.len(), || None);
        let nothing = PyTuple::empty(py).into_any().unbind();
        Ok(Self { pickle, names, made, persistent, free, nothing, converted: 0 })
    }

    /// A value, or `None` if it cannot be read.
    pub(super) fn or_none<'py>(&mut self, py: Python<'py>, id: Id, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        match self.value(py, id, depth) {
            Err(error) if error.is_instance_of::<ParseError>(py) => Ok(py.None().into_bound(py)),
            value => value,
        }
    }

    pub(super) fn value<'py>(&mut self, py: Python<'py>, id: Id, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        if let Some(made) = &self.made[id as usize] {
            return Ok(made.bind(py).clone());
        }
        if depth > MAX_DEPTH {
            return Err(ParseError::new_err(format!("values are nested more than {MAX_DEPTH} deep")));
        }
        self.converted += 1;
        if self.converted.is_multiple_of(SIGNALS_EVERY) {
            py.check_signals()?;
        }
        let pickle = self.pickle;
        let made = match pickle.value(id) {
            Value::None => return Ok(py.None().into_bound(py)),
            Value::Bool(value) => return Ok(PyBool::new(py, value).to_owned().into_any()),
            Value::Int(value) => return Ok(PyInt::new(py, value).into_any()),
            Value::Float(value) => return Ok(PyFloat::new(py, value).into_any()),
            Value::Long(span) => {
                let keywords = PyDict::new(py);
                keywords.set_item("signed", true)?;
                py.get_type::<PyInt>().call_method("from_bytes", (pickle.bytes(span), "little"), Some(&keywords))?
            }
            Value::Text(span) => {
                let Ok(text) = str::from_utf8(pickle.bytes(span)) else {
                    return Err(ParseError::new_err("holds a text that is not UTF-8"));
                };
                PyString::new(py, text).into_any()
            }
            Value::Bytes(span) => PyBytes::new(py, pickle.bytes(span)).into_any(),
            Value::Tuple(span) => {
                let items = self.values(py, pickle.tuple(span), depth)?;
                PyTuple::new(py, items)?.into_any()
            }
            Value::List(number) => {
                let items = self.values(py, pickle.list(number), depth)?;
                PyList::new(py, items)?.into_any()
            }
            Value::Set(number) => {
                let elements = self.values(py, pickle.list(number), depth)?;
                let elements = PyTuple::new(py, elements)?.into_any().unbind();
                self.record(py, "set", self.nothing.clone_ref(py), elements)?
            }
            Value::Dict(number) => self.dict(py, pickle.dict(number), depth)?,
            Value::Global(number) => {
                let name = self.names[number as usize].clone_ref(py);
                let (items, elements) = (self.nothing.clone_ref(py), self.nothing.clone_ref(py));
                Bound::new(py, Record { name, args: None, kwargs: None, state: None, items, elements })?.into_any()
            }
            Value::Getattr => return Err(ParseError::new_err("names getattr, which serves to run programs")),
            Value::Record(number) => self.call(py, pickle.record(number), id == pickle.root(), depth)?,
            Value::Persistent(inner) => {
                if !self.persistent {
                    return Err(ParseError::new_err("asks for a value of its container, which has none"));
                }
                let id = self.value(py, inner, depth + 1)?.unbind();
                Bound::new(py, Persistent { id })?.into_any()
            }
        };
        self.made[id as usize] = Some(made.clone().unbind());
        Ok(made)
    }

    fn values<'py>(&mut self, py: Python<'py>, ids: &[Id], depth: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut values = Vec::new();
        values.try_reserve_exact(ids.len()).map_err(|_| PyMemoryError::new_err("no memory for a list of a pickle"))?;
        for &id in ids {
            values.push(self.value(py, id, depth + 1)?);
        }
        Ok(values)
    }

    /// A dict of Python's where its keys are texts and integers, whose hashes cannot be chosen to collide.
    fn dict<'py>(&mut self, py: Python<'py>, pairs: &[(Id, Id)], depth: usize) -> PyResult<Bound<'py, PyAny>> {
        let plain = |&(key, _): &(Id, Id)| matches!(self.pickle.value(key), Value::Text(_) | Value::Int(_));
        if pairs.iter().all(plain) {
            let dict = PyDict::new(py);
            for &(key, value) in pairs {
                let key = self.value(py, key, depth + 1)?;
                dict.set_item(key, self.value(py, value, depth + 1)?)?;
            }
            return Ok(dict.into_any());
        }
        let items = self.pairs(py, pairs, depth)?;
        self.record(py, "dict", items, self.nothing.clone_ref(py))
    }

    fn pairs(&mut self, py: Python<'_>, pairs: &[(Id, Id)], depth: usize) -> PyResult<Py<PyAny>> {
        if pairs.is_empty() {
            return Ok(self.nothing.clone_ref(py));
        }
        let mut items = Vec::new();
        items.try_reserve_exact(pairs.len()).map_err(|_| PyMemoryError::new_err("no memory for a dict of a pickle"))?;
        for &(key, value) in pairs {
            items.push((self.value(py, key, depth + 1)?, self.value(py, value, depth + 1)?));
        }
        Ok(PyTuple::new(py, items)?.into_any().unbind())
    }

    fn call<'py>(
        &mut self,
        py: Python<'py>,
        record: &CoreRecord,
        is_root: bool,
        depth: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Value::Global(global) = self.pickle.value(record.callee) else {
            return Err(PyTypeError::new_err("a call of something that is not a global"));
        };
        let name = self.names[global as usize].clone_ref(py);
        let args = Some(self.value(py, record.arguments, depth + 1)?.unbind());
        let kwargs = record.keywords.map(|id| self.value(py, id, depth + 1).map(Bound::unbind)).transpose()?;
        let state = match record.state {
            Some(id) if is_root && !self.free.is_empty() => Some(self.root_state(py, id, depth + 1)?),
            Some(id) => Some(self.value(py, id, depth + 1)?.unbind()),
            None => None,
        };
        let items = self.pairs(py, self.pickle.items(record), depth)?;
        let elements = self.values(py, self.pickle.elements(record), depth)?;
        let elements = PyTuple::new(py, elements)?.into_any().unbind();
        Ok(Bound::new(py, Record { name, args, kwargs, state, items, elements })?.into_any())
    }

    /// The state of the outermost object: a free attribute that cannot be read is `None`.
    fn root_state(&mut self, py: Python<'_>, id: Id, depth: usize) -> PyResult<Py<PyAny>> {
        let Value::Dict(number) = self.pickle.value(id) else {
            return Err(PyTypeError::new_err("a state that is not a dict"));
        };
        let dict = PyDict::new(py);
        for &(key, value) in self.pickle.dict(number) {
            let key = self.value(py, key, depth + 1)?;
            let is_free = self.free.contains(&value);
            let value = if is_free { self.or_none(py, value, depth + 1)? } else { self.value(py, value, depth + 1)? };
            dict.set_item(key, value)?;
        }
        Ok(dict.into_any().unbind())
    }

    fn record<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        items: Py<PyAny>,
        elements: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let name = PyString::new(py, name).unbind();
        Ok(Bound::new(py, Record { name, args: None, kwargs: None, state: None, items, elements })?.into_any())
    }
}
