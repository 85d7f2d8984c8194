//! `_core.settle` and `_core.propagated`.

use pyo3::{exceptions::PyValueError, prelude::*, types::PyTuple};
use shardwise_core::{
    error::Error as CoreError,
    mesh::Mesh as CoreMesh,
    propagate::{Conflict, Flow, Lowered, Node, Op, Policy, Specs, Start, Way, layouts, lower, settle as settled},
    sub_axis::{self, SubAxis},
};

use crate::{
    convert::{integers, strings},
    errors::{guard, to_py},
    factor::{FactorRule, listed},
    mesh::Mesh,
};

/// Says how an op computes with tensors of these layouts, each the axes of its dims or none: the cuts of its factors, the layouts
/// of its tensors, those that it computes with, the axes of addends; or a conflict as its name, factors and operands.
#[pyfunction]
#[pyo3(signature = (mesh, rule, shapes, layouts, itemsizes, kept, policy, elementwise, /))]
#[allow(clippy::too_many_arguments, reason = "they are what an op is, and it is asked in one place")]
pub(crate) fn settle<'py>(
    py: Python<'py>,
    mesh: &Mesh,
    rule: &FactorRule,
    shapes: &Bound<'py, PyAny>,
    layouts: &Bound<'py, PyAny>,
    itemsizes: &Bound<'py, PyAny>,
    kept: &Bound<'py, PyAny>,
    policy: &str,
    elementwise: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    guard(|| {
        let policy = policy_named(policy)?;
        let shapes = listed("shapes", shapes)?;
        let shapes: Vec<&[i64]> = shapes.iter().map(Vec::as_slice).collect();
        let itemsizes = integers("itemsizes", itemsizes)?;
        let layouts = layouts.try_iter()?.map(|layout| specs(&mesh.core, &layout?)).collect::<PyResult<Vec<_>>>()?;
        let rule = rule.core.sized(&shapes).map_err(to_py)?;
        let ranked = |(tensor, layout): (usize, &Option<Specs>)| {
            layout.as_ref().is_none_or(|specs| specs.len() == shapes[tensor].len())
        };
        let fits = layouts.len() == shapes.len() && itemsizes.len() == shapes.len();
        if !fits || !layouts.iter().enumerate().all(ranked) {
            return Err(PyValueError::new_err("shapes, layouts and itemsizes must be of the same tensors"));
        }
        let mesh = &mesh.core;
        let kept = axes(mesh, kept)?;
        let (layouts, itemsizes, kept) = (layouts.as_slice(), itemsizes.as_slice(), kept.as_slice());
        let op = Op { mesh, rule: &rule, elementwise, shapes: &shapes, layouts, itemsizes, kept };
        let found = match py.detach(|| settled(op, policy)).map_err(to_py)? {
            Ok(found) => found,
            Err(conflict) => return described(conflict).into_pyobject(py),
        };
        let names = |specs: &[Vec<SubAxis>]| named(py, mesh, specs);
        let all = |layouts: &[Specs]| {
            PyTuple::new(py, layouts.iter().map(|specs| names(specs)).collect::<PyResult<Vec<_>>>()?)
        };
        let summed = PyTuple::new(py, texts(mesh, &found.summed))?;
        (names(&found.cuts)?, all(&found.layouts)?, all(&found.local)?, summed).into_pyobject(py)
    })
}

/// An op: its rule, when layouts go through it, and the numbers of its values.
type Op3<'py> = (PyRef<'py, FactorRule>, String, Vec<usize>);

/// The layout of each value of a computation, none where nothing cuts it; and for each op, then each result, none or the cuts
/// of its factors, the layouts that it computes with where they are others, the axes of addends, and where a reshape cannot be
/// computed with these, those with which it can.
///
/// `starts` has for each value none or its layout, whether each dim may take more, and when it gets its axes; `same` the value
/// whose layout each has; the first `inputs` are given; `outputs` are edges to the results. With `settled` the layouts are those
/// that values begin with.
#[pyfunction]
#[pyo3(signature = (mesh, shapes, starts, same, inputs, ops, outputs, itemsizes, policy, settled, /))]
#[allow(clippy::too_many_arguments, reason = "they are what a computation is, and it is asked in one place")]
pub(crate) fn propagated<'py>(
    py: Python<'py>,
    mesh: &Mesh,
    shapes: &Bound<'py, PyAny>,
    starts: &Bound<'py, PyAny>,
    same: Vec<usize>,
    inputs: usize,
    ops: &Bound<'py, PyAny>,
    outputs: &Bound<'py, PyAny>,
    itemsizes: &Bound<'py, PyAny>,
    policy: &str,
    settled: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    guard(|| {
        let policy = policy_named(policy)?;
        let itemsizes = integers("itemsizes", itemsizes)?;
        let shapes = listed("shapes", shapes)?;
        let shapes: Vec<&[i64]> = shapes.iter().map(Vec::as_slice).collect();
        let start = |start: PyResult<Bound<'py, PyAny>>| {
            let start = start?;
            if start.is_none() {
                return Ok(None);
            }
            let (layout, open, priorities): (Bound<'py, PyAny>, Vec<bool>, Vec<u32>) = start.extract()?;
            Ok(specs(&mesh.core, &layout)?.map(|specs| Start { specs, open, priorities }))
        };
        let starts = starts.try_iter()?.map(start).collect::<PyResult<Vec<_>>>()?;
        let way = |name: &str| match name {
            "alike" => Ok(Way::Alike),
            "first" => Ok(Way::First),
            "forward" => Ok(Way::Forward),
            "broadcast" => Ok(Way::Broadcast),
            "edge" => Ok(Way::Edge),
            "constraint" => Ok(Way::Constraint),
            "later" => Ok(Way::Later),
            other => Err(PyValueError::new_err(format!("way is {other:?}"))),
        };
        let node = |op: PyResult<Bound<'py, PyAny>>| {
            let (rule, name, values): Op3<'py> = op?.extract()?;
            Ok(Node { rule: rule.core.clone(), way: way(&name)?, values })
        };
        let nodes = ops.try_iter()?.map(node).collect::<PyResult<Vec<Node>>>()?;
        let outputs = outputs.try_iter()?.map(node).collect::<PyResult<Vec<Node>>>()?;
        let ranked = |(value, start): (usize, &Option<Start>)| {
            let rank = shapes[value].len();
            let fits = |start: &Start| [start.specs.len(), start.open.len(), start.priorities.len()] == [rank; 3];
            start.as_ref().is_none_or(fits)
        };
        let in_range = |node: &Node| {
            let ranks = |(tensor, value): (usize, &usize)| {
                shapes.get(*value).is_some_and(|shape| shape.len() == node.rule.rank(tensor))
            };
            node.values.len() == node.rule.tensors() && node.values.iter().enumerate().all(ranks)
        };
        let fits = starts.len() == shapes.len()
            && same.len() == shapes.len()
            && itemsizes.len() == shapes.len()
            && starts.iter().enumerate().all(ranked)
            && nodes.iter().chain(&outputs).all(in_range)
            && outputs.iter().all(|edge| edge.values.len() == 2)
            && same.iter().enumerate().all(|(value, owner)| shapes.get(*owner) == Some(&shapes[value]));
        if !fits {
            return Err(PyValueError::new_err("shapes, starts, ops and outputs must be of the same values"));
        }
        let (nodes, outputs) = (nodes.as_slice(), outputs.as_slice());
        let flow = Flow { mesh: &mesh.core, shapes: &shapes, starts: &starts, same: &same, inputs, nodes, outputs };
        let found = py.detach(|| {
            let begun = || starts.iter().map(|start| start.as_ref().map(|start| start.specs.clone())).collect();
            let found = if settled { begun() } else { layouts(flow) };
            let lowered = lower(flow, &found, &itemsizes, policy)?;
            Ok::<_, CoreError>((found, lowered))
        });
        let (found, lowered) = found.map_err(to_py)?;
        let names = |specs: &[Vec<SubAxis>]| named(py, &mesh.core, specs);
        let all = |layouts: &[Option<Specs>]| {
            let layouts = layouts.iter().map(|layout| layout.as_deref().map(names).transpose());
            PyTuple::new(py, layouts.collect::<PyResult<Vec<_>>>()?)
        };
        let lowered = lowered.iter().map(|op| {
            let op = op.as_ref();
            let summed = |op: &Lowered| PyTuple::new(py, texts(&mesh.core, &op.summed));
            op.map(|op| Ok((names(&op.cuts)?, all(&op.local)?, summed(op)?, all(&op.possible)?))).transpose()
        });
        (all(&found)?, PyTuple::new(py, lowered.collect::<PyResult<Vec<_>>>()?)?).into_pyobject(py)
    })
}

fn policy_named(policy: &str) -> PyResult<Policy> {
    match policy {
        "explicit" => Ok(Policy::Explicit),
        "shardy" => Ok(Policy::Shardy),
        "least" => Ok(Policy::Least),
        other => Err(PyValueError::new_err(format!("policy is {other:?}"))),
    }
}

fn described(conflict: Conflict) -> (&'static str, Vec<usize>, Vec<usize>) {
    match conflict {
        Conflict::Differ { factor, operands } => ("differ", vec![factor], operands.to_vec()),
        Conflict::Ambiguous { factor } => ("ambiguous", vec![factor], Vec::new()),
        Conflict::Twice { factors } => ("twice", factors.to_vec(), Vec::new()),
        Conflict::NotSummed => ("not summed", Vec::new(), Vec::new()),
        Conflict::Open { operand } => ("open", Vec::new(), vec![operand]),
    }
}

/// The axes of each dim, as a tuple of tuples.
fn named<'py>(py: Python<'py>, mesh: &CoreMesh, specs: &[Vec<SubAxis>]) -> PyResult<Bound<'py, PyTuple>> {
    let dims = specs.iter().map(|spec| PyTuple::new(py, texts(mesh, spec))).collect::<PyResult<Vec<_>>>()?;
    PyTuple::new(py, dims)
}

fn texts(mesh: &CoreMesh, axes: &[SubAxis]) -> Vec<String> {
    let text = |axis: &SubAxis| {
        let name = &mesh.names()[axis.axis];
        let whole = axis.size == mesh.sizes()[axis.axis];
        if whole { name.clone() } else { sub_axis::text(name, axis.before, axis.size) }
    };
    axes.iter().map(text).collect()
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
