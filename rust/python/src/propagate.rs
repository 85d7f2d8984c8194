//! `_core.Computation`, `_core.Propagated`, `_core.propagated` and `_core.settle`.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::{Arc, OnceLock},
};

use pyo3::{exceptions::PyValueError, prelude::*, types::PyTuple};
use shardwise_core::{
    computation::{Computation as CoreComputation, Constraint, Does, Op as CoreOp, Ruled},
    mesh::Mesh as CoreMesh,
    propagate::{
        Bodies, Flow, Lowered, Made, Node, Op, Ops, Part, Policy, Propagated as CorePropagated, Specs, Start, Way,
        propagate, settle as settled,
    },
    sub_axis::SubAxis,
};

use crate::{
    convert::strings,
    errors::{answer, guard, to_py},
    factor::{FactorRule, Shapes},
    mesh::Mesh,
};

/// For an op whose tensors have these layouts, each the axes of its dims or none, those that they get, and how it computes; none if
/// no way leaves addends over the axes that are to stay.
#[pyfunction]
#[pyo3(signature = (mesh, rule, shapes, layouts, itemsize, kept, policy, /))]
#[allow(clippy::too_many_arguments, reason = "they are what an op is, and it is asked in one place")]
pub(crate) fn settle<'py>(
    py: Python<'py>,
    mesh: &Mesh,
    rule: &FactorRule,
    shapes: &Bound<'py, PyAny>,
    layouts: &Bound<'py, PyAny>,
    itemsize: i64,
    kept: &Bound<'py, PyAny>,
    policy: &str,
) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        let policy = policy_named(policy)?;
        let shapes = Shapes::new("shapes", shapes)?;
        let shapes = shapes.all();
        let layouts = layouts.try_iter()?.map(|layout| specs(&mesh.core, &layout?)).collect::<PyResult<Vec<_>>>()?;
        let rule = rule.core.sized(&shapes).map_err(to_py)?;
        let mesh = &mesh.core;
        let kept = axes(mesh, kept)?;
        let op = Op { mesh, rule: &rule, shapes: &shapes, layouts: &layouts, itemsize, kept: &kept };
        let Some((layouts, way)) = py.detach(|| settled(op, policy)).map_err(to_py)? else { return Ok(None) };
        let layouts = layouts.iter().map(|specs| named(py, mesh, specs)).collect::<PyResult<Vec<_>>>()?;
        Ok(Some((layouts, how(py, mesh, &way)?)))
    })
}

/// The cuts of an op's factors, the layouts that it computes with where they are others than those of its values, the axes of
/// addends, and where a reshape cannot be computed with these layouts, those with which it can.
fn how<'py>(py: Python<'py>, mesh: &CoreMesh, op: &Lowered) -> PyResult<Bound<'py, PyTuple>> {
    let all = |layouts: &[Option<Specs>]| {
        let layouts = layouts.iter().map(|layout| layout.as_ref().map(|specs| named(py, mesh, specs)).transpose());
        PyTuple::new(py, layouts.collect::<PyResult<Vec<_>>>()?)
    };
    let summed = PyTuple::new(py, texts(mesh, &op.summed))?;
    (named(py, mesh, &op.cuts)?, all(&op.local)?, summed, all(&op.possible)?).into_pyobject(py)
}

/// An op as Python says it: name, operands, results, rule, bodies, trips, axes, open dims and place of a constraint, the dim of
/// the features in the first operand of a convolution.
type SaidOp<'py> = (
    String,
    Vec<usize>,
    Vec<usize>,
    Option<PyRef<'py, FactorRule>>,
    Vec<PyRef<'py, Computation>>,
    i64,
    Option<(Vec<Vec<String>>, Vec<usize>, String)>,
    Option<usize>,
);

/// A computation.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Computation {
    core: Arc<CoreComputation>,
    /// The ops as layouts go through them, once they have.
    ops: OnceLock<Arc<Ops>>,
}

#[pymethods]
impl Computation {
    #[new]
    #[pyo3(signature = (shapes, dtypes, inputs, ops, outputs, /))]
    fn new(
        shapes: &Bound<'_, PyAny>,
        dtypes: Vec<String>,
        inputs: usize,
        ops: &Bound<'_, PyAny>,
        outputs: Vec<usize>,
    ) -> PyResult<Self> {
        guard(|| {
            let shapes: Vec<Arc<[i64]>> = Shapes::new("shapes", shapes)?.all().into_iter().map(Arc::from).collect();
            let dtypes: Vec<Arc<str>> = dtypes.into_iter().map(Arc::from).collect();
            let mut rules = HashSet::new();
            let ops = ops.try_iter()?.map(|op| said(op?.extract()?, &shapes, &mut rules));
            let ops = ops.collect::<PyResult<Vec<_>>>()?;
            let core = Arc::new(CoreComputation { shapes, dtypes, inputs, ops, outputs });
            Ok(Self { core, ops: OnceLock::new() })
        })
    }
}

/// Ops that are alike have one of the `rules`.
fn said(said: SaidOp<'_>, shapes: &[Arc<[i64]>], rules: &mut HashSet<Arc<Ruled>>) -> PyResult<CoreOp> {
    let (name, operands, results, rule, bodies, trips, constraint, feature) = said;
    let bodies: Vec<Arc<CoreComputation>> = bodies.iter().map(|body| body.core.clone()).collect();
    let does = match (rule, &bodies[..], constraint) {
        (Some(rule), ..) => {
            let shapes = operands.iter().chain(&results).map(|value| shapes[*value].clone()).collect();
            let ruled = Arc::new(Ruled { name, rule: rule.core.clone(), shapes, feature });
            Does::Rule(rules.get(&ruled).cloned().unwrap_or_else(|| {
                rules.insert(ruled.clone());
                ruled
            }))
        }
        (_, [test, body], _) if name == "while" => Does::While([test.clone(), body.clone()]),
        (_, [_, ..], _) if name == "case" => Does::Case(bodies),
        (_, [body], _) if name == "loop" => Does::Loop(body.clone(), trips),
        (_, [body], _) => Does::Call(body.clone()),
        (.., Some((axes, open, place))) => {
            let open = (0..axes.len()).map(|dim| open.contains(&dim)).collect();
            Does::Constraint(Arc::new(Constraint { axes, open, place }))
        }
        _ if name == "barrier" => Does::Barrier,
        _ => Does::Constant,
    };
    Ok(CoreOp { operands, results, does })
}

/// An op or edge: its number, the part of its op that it is, the op's place, which an edge to a result does not have, the values, and
/// how often it is computed.
type SaidNode = (usize, &'static str, Vec<usize>, Vec<usize>, i64);

fn said_node(flow: &Flow, number: usize, node: &Node) -> SaidNode {
    let part = match (node.way, node.part) {
        (Way::Constraint, _) => "constraint",
        (_, Part::Op) => "op",
        (_, Part::Operand) => "operand",
        (_, Part::Result) => "result",
        (_, Part::Output) => "output",
    };
    let place = if node.part == Part::Output { Vec::new() } else { flow.path(node.place) };
    (number, part, place, node.values.clone(), node.times)
}

/// The layouts of all values of a computation, and how its ops compute.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct Propagated {
    core: CorePropagated,
}

/// Ops and edges are numbered in order, those to results last; an op is named by its place: its number in the computation, then in
/// the body of that op, and so on.
#[pymethods]
impl Propagated {
    /// For each value of the computation its number here, and for each result.
    #[getter]
    fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let flow = &self.core.flow;
            Ok((flow.numbers.clone(), flow.outputs.iter().map(|edge| edge.values[1]).collect::<Vec<_>>()))
        })
    }

    /// All ops and edges, then the edges to results.
    #[getter]
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let flow = &self.core.flow;
            let said = |number: usize| said_node(flow, number, self.core.node(number));
            let (count, all) = (flow.nodes.len(), self.core.lowered.len());
            Ok([0..count, count..all].map(|numbers| numbers.map(said).collect::<Vec<_>>()))
        })
    }

    /// The ops and edges for which something moves, or may, each after the number of the first that moves as it does.
    #[getter]
    fn moving<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let flow = &self.core.flow;
            let mut firsts = HashMap::new();
            let of = |number: usize| {
                let node = self.core.node(number);
                // What computes in one way is of one rule, and of values of the same layouts.
                let way = self.core.lowered[number].as_ref().map(Arc::as_ptr);
                let dtypes: Vec<&str> = node.values.iter().map(|value| &*flow.dtypes[*value]).collect();
                let first = *firsts.entry((way, node.part, dtypes)).or_insert(number);
                (first, said_node(flow, number, node))
            };
            Ok(self.core.moving().map(of).collect::<Vec<_>>())
        })
    }

    /// The constants: of each the value, the place of the op that makes it, and its operands.
    #[getter]
    fn constants<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let flow = &self.core.flow;
            let of = |made: &Made| (made.value, flow.path(made.place), made.operands.clone());
            Ok(flow.constants.iter().map(of).collect::<Vec<_>>())
        })
    }

    /// The bodies of loops and cases: the first op and the place after the last of each, the values that those of a loop take, how
    /// often, and the value that decides.
    #[getter]
    fn bodies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let of = |body: &Bodies| (body.bounds.clone(), body.inner.clone(), body.trips, body.decides);
            Ok(self.core.flow.bodies.iter().map(of).collect::<Vec<_>>())
        })
    }

    /// The number of each value in its own computation or body.
    #[getter]
    fn origins<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(&self.core.flow.origins))
    }

    /// The shape, the dtype and the layout of a value, which is none where nothing cuts it.
    #[pyo3(signature = (number, /))]
    fn value<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| {
            let flow = &self.core.flow;
            let specs = self.core.layouts[number].as_deref().map(|specs| named(py, &flow.mesh, specs)).transpose()?;
            (PyTuple::new(py, &*flow.shapes[number])?, &*flow.dtypes[number], specs).into_pyobject(py)
        })
    }

    /// The cuts and layouts with which an op or edge computes; none where nothing cuts any value of it.
    #[pyo3(signature = (number, /))]
    fn how<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || self.core.lowered[number].as_deref().map(|op| how(py, &self.core.flow.mesh, op)).transpose())
    }
}

/// The layouts of all values of a computation by a policy, and how its ops compute. `inputs` and `results` have for each none or the
/// layout that it begins with, whether each dim may take more, and when it gets its axes; `itemsize` gives the bytes of an element
/// of a dtype. For the fewest bytes also those that come out if inputs which a step replaces spread last, if there are any.
///
/// Where explicit mode gives none, why in words, the operands that disagree, each with the input that its layout is from, and the
/// place of the op.
#[pyfunction]
#[pyo3(signature = (mesh, computation, inputs, results, itemsize, policy, /))]
pub(crate) fn propagated<'py>(
    py: Python<'py>,
    mesh: &Mesh,
    computation: &Computation,
    inputs: &Bound<'py, PyAny>,
    results: &Bound<'py, PyAny>,
    itemsize: &Bound<'py, PyAny>,
    policy: &str,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| {
        let (policy, core) = (policy_named(policy)?, &computation.core);
        let (inputs, results) = (starts(mesh, inputs)?, starts(mesh, results)?);
        let ops = match computation.ops.get() {
            Some(known) => known,
            None => {
                let ops = Arc::new(Ops::new(core).map_err(to_py)?);
                computation.ops.get_or_init(|| ops)
            }
        };
        let starts = [inputs, results];
        let later = if policy == Policy::Least { ops.replaced_last(&starts) } else { None };
        let starts = [starts].into_iter().chain(later);
        let flows =
            starts.map(|starts| Flow::new(ops, &mesh.core, starts).map_err(to_py)).collect::<PyResult<Vec<_>>>()?;
        let mut known: Vec<(Arc<str>, i64)> = Vec::new();
        let of = |dtype: &Arc<str>| {
            if let Some((_, size)) = known.iter().find(|(name, _)| name == dtype) {
                return Ok(*size);
            }
            let size: i64 = itemsize.call1((&**dtype,))?.extract()?;
            known.push((dtype.clone(), size));
            Ok(size)
        };
        let itemsizes = ops.dtypes.iter().map(of).collect::<PyResult<Vec<_>>>()?;
        match py.detach(|| propagate(flows, &itemsizes, policy)).map_err(to_py)? {
            Ok(found) => found.into_iter().map(|core| Propagated { core }).collect::<Vec<_>>().into_pyobject(py),
            Err(found) => Ok((found.why, found.operands, found.place).into_pyobject(py)?.into_any()),
        }
    })
}

/// For each value none or how its layout begins.
fn starts(mesh: &Mesh, given: &Bound<'_, PyAny>) -> PyResult<Vec<Option<Arc<Start>>>> {
    let of = |start: &Bound<'_, PyAny>| {
        let (layout, open, priorities): (Bound<'_, PyAny>, Vec<bool>, Vec<u32>) = start.extract()?;
        Ok::<_, PyErr>(specs(&mesh.core, &layout)?.map(|specs| Arc::new(Start { specs, open, priorities })))
    };
    // Many begin as one object.
    let given = given.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let mut known: HashMap<*mut pyo3::ffi::PyObject, Option<Arc<Start>>> = HashMap::new();
    let start = |start: &Bound<'_, PyAny>| {
        Ok(match known.entry(start.as_ptr()) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => new.insert(if start.is_none() { None } else { of(start)? }).clone(),
        })
    };
    given.iter().map(start).collect()
}

fn policy_named(policy: &str) -> PyResult<Policy> {
    match policy {
        "explicit" => Ok(Policy::Explicit),
        "shardy" => Ok(Policy::Shardy),
        "least" => Ok(Policy::Least),
        other => Err(PyValueError::new_err(format!("policy is {other:?}"))),
    }
}

/// The axes of each dim, as a tuple of tuples.
fn named<'py>(py: Python<'py>, mesh: &CoreMesh, specs: &[Vec<SubAxis>]) -> PyResult<Bound<'py, PyTuple>> {
    let dims = specs.iter().map(|spec| PyTuple::new(py, texts(mesh, spec))).collect::<PyResult<Vec<_>>>()?;
    PyTuple::new(py, dims)
}

fn texts(mesh: &CoreMesh, axes: &[SubAxis]) -> Vec<String> {
    axes.iter().map(|axis| axis.name(mesh)).collect()
}

fn specs(mesh: &CoreMesh, layout: &Bound<'_, PyAny>) -> PyResult<Option<Specs>> {
    if layout.is_none() {
        return Ok(None);
    }
    layout.try_iter()?.map(|dim| axes(mesh, &dim?)).collect::<PyResult<Specs>>().map(Some)
}

fn axes(mesh: &CoreMesh, names: &Bound<'_, PyAny>) -> PyResult<Vec<SubAxis>> {
    let axis = |name: &String| SubAxis::named(mesh, name, || "axes".to_owned()).map_err(to_py);
    strings("axes", names)?.iter().map(axis).collect()
}
