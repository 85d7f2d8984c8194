//! `_core.FactorRule` and `_core.factor_rule`.

use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBool, PyDict, PyInt, PyList, PySequence, PyString, PyTuple},
};
use shardwise_core::factor::{Attribute, Attributes, Kind, Reduction, Rule, is_known, rule};

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
                let wrong = || {
                    let all = Kind::ALL.map(|(_, known)| known).join(", ");
                    LayoutError::new_err(format!("the kind of factor {name:?} is {kind:?}; it must be one of {all}"))
                };
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

    /// The rule as text.
    #[getter]
    fn text<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.to_string()))
    }

    /// The names of the factors.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| PyTuple::new(py, (0..self.core.factors().len()).map(|factor| self.core.name(factor))))
    }

    /// True if a text gave it.
    #[getter]
    fn is_named<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.core.is_named()))
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
            let shapes = Shapes::new("operands", operands)?.and("results", results)?;
            Ok(Self { core: self.core.sized(&shapes.all()).map_err(to_py)? })
        })
    }
}

/// The rule of an op whose operands and results have these shapes.
#[pyfunction]
#[pyo3(signature = (op, operands, results, attributes, /))]
pub(crate) fn factor_rule(
    py: Python<'_>,
    op: &Bound<'_, PyAny>,
    operands: &Bound<'_, PyAny>,
    results: &Bound<'_, PyAny>,
    attributes: &Bound<'_, PyDict>,
) -> PyResult<Py<FactorRule>> {
    guard(|| {
        let name = op.cast::<PyString>();
        let name =
            name.map_err(|_| PyTypeError::new_err(format!("op must be a string, got {}", repr(op))))?.to_str()?;
        let operands = Shapes::new("operands", operands)?;
        let count = operands.count;
        let shapes = operands.and("results", results)?;
        let shapes = shapes.all();
        let (operands, results) = shapes.split_at(count);
        let said: Vec<_> = attributes.iter().collect();
        let mut attributes = Attributes(Vec::with_capacity(said.len()));
        for (name, value) in &said {
            let name = name.cast::<PyString>()?.to_str()?;
            attributes.0.push((name, attribute(name, value)?));
        }
        Py::new(py, FactorRule { core: rule(name, operands, results, &attributes).map_err(to_py)? })
    })
}

/// Says whether there is a rule for an op of this name.
#[pyfunction]
#[pyo3(signature = (op, /))]
pub(crate) fn has_factor_rule<'py>(py: Python<'py>, op: &str) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || Ok(is_known(op)))
}

/// Shapes, one after the other.
pub(crate) struct Shapes {
    count: usize,
    /// The number of dims of each shape, then their sizes.
    sizes: Vec<i64>,
}

impl Shapes {
    pub(crate) fn new(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self { count: 0, sizes: Vec::with_capacity(16) }.and(name, given)
    }

    /// The shapes with others after them.
    fn and(mut self, name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let before = self.count;
        let mut add = |shape: &Bound<'_, PyAny>| self.add(name, before, shape);
        if let Ok(list) = given.cast_exact::<PyList>() {
            list.iter().try_for_each(|shape| add(&shape))?;
        } else if let Ok(list) = given.cast_exact::<PyTuple>() {
            list.iter_borrowed().try_for_each(|shape| add(&shape))?;
        } else if given.is_instance_of::<PyString>() || !given.is_instance_of::<PySequence>() {
            let given = repr(given);
            return Err(PyTypeError::new_err(format!("{name} must be a sequence of shapes, got {given}")));
        } else {
            given.try_iter()?.try_for_each(|shape| add(&shape?))?;
        }
        Ok(self)
    }

    fn add(&mut self, name: &str, before: usize, shape: &Bound<'_, PyAny>) -> PyResult<()> {
        let (rank, number) = (self.sizes.len(), self.count - before);
        self.sizes.push(0);
        if !plain_integers(shape, &mut self.sizes) {
            self.sizes.extend(integers(&format!("{name}[{number}]"), shape)?);
        }
        let sizes = &self.sizes[rank + 1..];
        if let Some(dim) = sizes.iter().position(|size| *size < 0) {
            let why = format!("{name}[{number}][{dim}] is {}, but a dim has at least 0 elements", sizes[dim]);
            return Err(LayoutError::new_err(why));
        }
        self.sizes[rank] = sizes.len() as i64;
        self.count += 1;
        Ok(())
    }

    pub(crate) fn all(&self) -> Vec<&[i64]> {
        let mut rest = &self.sizes[..];
        let next = |_| {
            let (rank, sizes) = rest.split_first().unwrap_or((&0, &[]));
            let (shape, after) = sizes.split_at(*rank as usize);
            rest = after;
            shape
        };
        (0..self.count).map(next).collect()
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
