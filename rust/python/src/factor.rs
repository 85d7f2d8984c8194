//! `_core.FactorRule` and `_core.factor_rule`.

use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBool, PyDict, PyInt, PyList, PySequence, PyString, PyTuple},
};
use shardwise_core::factor::{Attribute, Attributes, Kind, Reduction, Rule, rule};

use crate::{
    convert::{integer, integers, repr, strings},
    errors::{LayoutError, answer, guard, to_py},
};

/// A factor rule.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct FactorRule {
    pub(crate) core: Rule,
}

#[pymethods]
impl FactorRule {
    /// `kinds` and `sizes` give what is known of some factors by their names; `order` the numbers of the first.
    #[new]
    #[pyo3(signature = (text, kinds, blocked, sizes, reduction, order, /))]
    fn new(
        text: &str,
        kinds: Vec<(String, String)>,
        blocked: &Bound<'_, PyAny>,
        sizes: Vec<(String, i64)>,
        reduction: &str,
        order: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        guard(|| {
            let order = strings("order", order)?;
            let order: Vec<&str> = order.iter().map(String::as_str).collect();
            let blocked = strings("blocked", blocked)?;
            let blocked: Vec<&str> = blocked.iter().map(String::as_str).collect();
            let known = |name: &str| Kind::ALL.into_iter().find(|(_, known)| *known == name).map(|(kind, _)| kind);
            let kinds = kinds.iter().map(|(name, kind)| {
                let wrong = || LayoutError::new_err(format!("the kind of factor {name:?} is {kind:?}"));
                Ok((name.as_str(), known(kind).ok_or_else(wrong)?))
            });
            let kinds = kinds.collect::<PyResult<Vec<_>>>()?;
            let sizes: Vec<(&str, i64)> = sizes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            let reduction = reduction_named(reduction)?;
            let core = Rule::parse(text, &kinds, &blocked, &sizes, reduction, &order).map_err(to_py)?;
            Ok(Self { core })
        })
    }

    /// For each operand and result, for each dim the numbers of its factors.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let tensor = |tensor: usize| {
                let dims = (0..self.core.rank(tensor)).map(|dim| PyTuple::new(py, self.core.dim(tensor, dim)));
                PyTuple::new(py, dims.collect::<PyResult<Vec<_>>>()?)
            };
            PyTuple::new(py, (0..self.core.tensors()).map(tensor).collect::<PyResult<Vec<_>>>()?)
        })
    }

    /// The number of operands.
    #[getter]
    fn operands<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.operands()))
    }

    /// For each factor its size, or -1, its kind, and whether it is blocked.
    #[getter]
    fn factors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let factors = self.core.factors().iter().map(|factor| (factor.size, factor.kind.name(), factor.blocked));
            PyTuple::new(py, factors)
        })
    }

    /// The name of the reduction of its sums.
    #[getter]
    fn reduction<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.reduction().name()))
    }

    /// The rule with the sizes that operands and results of these shapes give its factors.
    #[pyo3(signature = (operands, results, /))]
    fn sized(&self, operands: &Bound<'_, PyAny>, results: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| {
            let (operands, results) = (Shapes::new("operands", operands)?, Shapes::new("results", results)?);
            Ok(Self { core: self.core.sized(&[operands.all(), results.all()].concat()).map_err(to_py)? })
        })
    }
}

/// The rule of an op whose operands and results have these shapes.
#[pyfunction]
#[pyo3(signature = (op, operands, results, attributes, /))]
pub(crate) fn factor_rule(
    py: Python<'_>,
    op: &str,
    operands: &Bound<'_, PyAny>,
    results: &Bound<'_, PyAny>,
    attributes: &Bound<'_, PyDict>,
) -> PyResult<Py<FactorRule>> {
    guard(|| {
        let (operands, results) = (Shapes::new("operands", operands)?, Shapes::new("results", results)?);
        let attributes = attributes.iter().map(|(name, value)| {
            let name: String = name.extract()?;
            let value = attribute(&name, &value)?;
            Ok((name, value))
        });
        let attributes = Attributes(attributes.collect::<PyResult<_>>()?);
        Py::new(py, FactorRule { core: rule(op, &operands.all(), &results.all(), &attributes).map_err(to_py)? })
    })
}

/// Shapes, one after the other.
pub(crate) struct Shapes {
    sizes: Vec<i64>,
    ends: Vec<usize>,
}

impl Shapes {
    pub(crate) fn new(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut found = Self { sizes: Vec::with_capacity(8), ends: Vec::with_capacity(4) };
        if let Ok(list) = given.cast_exact::<PyList>() {
            list.iter().try_for_each(|shape| found.add(name, &shape))?;
        } else if let Ok(list) = given.cast_exact::<PyTuple>() {
            list.iter_borrowed().try_for_each(|shape| found.add(name, &shape))?;
        } else if given.is_instance_of::<PyString>() || !given.is_instance_of::<PySequence>() {
            let given = repr(given);
            return Err(PyTypeError::new_err(format!("{name} must be a sequence of shapes, got {given}")));
        } else {
            given.try_iter()?.try_for_each(|shape| found.add(name, &shape?))?;
        }
        Ok(found)
    }

    fn add(&mut self, name: &str, shape: &Bound<'_, PyAny>) -> PyResult<()> {
        let (first, number) = (self.sizes.len(), self.ends.len());
        if !plain_integers(shape, &mut self.sizes) {
            self.sizes.extend(integers(&format!("{name}[{number}]"), shape)?);
        }
        if let Some(dim) = self.sizes[first..].iter().position(|size| *size < 0) {
            let size = self.sizes[first + dim];
            let why = format!("{name}[{number}][{dim}] is {size}, but a dim has at least 0 elements");
            return Err(LayoutError::new_err(why));
        }
        self.ends.push(self.sizes.len());
        Ok(())
    }

    pub(crate) fn all(&self) -> Vec<&[i64]> {
        let first = |number: usize| if number == 0 { 0 } else { self.ends[number - 1] };
        self.ends.iter().enumerate().map(|(number, end)| &self.sizes[first(number)..*end]).collect()
    }
}

/// Adds the integers of a tuple or a list that has nothing else; false for all others.
fn plain_integers(given: &Bound<'_, PyAny>, into: &mut Vec<i64>) -> bool {
    let before = into.len();
    let mut add = |item: &Bound<'_, PyAny>| {
        item.is_exact_instance_of::<PyInt>()
            && item.extract().is_ok_and(|number| {
                into.push(number);
                true
            })
    };
    let all = if let Ok(tuple) = given.cast_exact::<PyTuple>() {
        tuple.iter_borrowed().all(|item| add(&item))
    } else if let Ok(list) = given.cast_exact::<PyList>() {
        list.iter().all(|item| add(&item))
    } else {
        false
    };
    if !all {
        into.truncate(before);
    }
    all
}

fn reduction_named(name: &str) -> PyResult<Reduction> {
    Reduction::named(name).ok_or_else(|| {
        let names: Vec<_> = Reduction::ALL.iter().map(|(_, name)| *name).collect();
        LayoutError::new_err(format!("reduction is {name:?}; it must be one of {}", names.join(", ")))
    })
}

fn attribute(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Attribute> {
    let mut numbers = Vec::new();
    if plain_integers(value, &mut numbers) {
        return Ok(Attribute::Integers(numbers));
    }
    if let Ok(truth) = value.cast_exact::<PyBool>() {
        return Ok(Attribute::Integer(i64::from(truth.is_true())));
    }
    if value.is_instance_of::<PyInt>() || value.hasattr("__index__")? {
        return Ok(Attribute::Integer(integer(name, value)?));
    }
    if value.is_instance_of::<PyString>() {
        return Ok(Attribute::Word(value.extract()?));
    }
    let wrong = || {
        let given = repr(value);
        PyTypeError::new_err(format!("attribute {name} must be a number, a word, or a list of these, got {given}"))
    };
    let items = value.try_iter().map_err(|_| wrong())?.collect::<PyResult<Vec<_>>>()?;
    if items.iter().any(|item| item.is_instance_of::<PyString>()) {
        let words = items.iter().map(|item| item.str().map(|text| text.to_string()));
        return Ok(Attribute::Words(words.collect::<PyResult<_>>()?));
    }
    if items.first().is_some_and(|item| item.hasattr("__len__").unwrap_or(false)) {
        let pair = |item: &Bound<'_, PyAny>| <[i64; 2]>::try_from(integers(name, item)?).map_err(|_| wrong());
        return Ok(Attribute::Pairs(items.iter().map(pair).collect::<PyResult<_>>()?));
    }
    Ok(Attribute::Integers(items.iter().map(|item| integer(name, item)).collect::<PyResult<_>>()?))
}
