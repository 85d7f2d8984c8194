//! `_core.settle` and `_core.propagated`.

use pyo3::{exceptions::PyValueError, prelude::*, types::PyTuple};
use shardwise_core::{
    mesh::Mesh as CoreMesh,
    propagate::{Conflict, Node, Op, Policy, Specs, Start, Way, layouts, settle as settled},
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
        let policy = match policy {
            "explicit" => Policy::Explicit,
            "shardy" => Policy::Shardy,
            "least" => Policy::Least,
            other => return Err(PyValueError::new_err(format!("policy is {other:?}"))),
        };
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
        let names = |specs: &[Vec<SubAxis>]| PyTuple::new(py, specs.iter().map(|spec| texts(mesh, spec)));
        let all = |layouts: &[Specs]| {
            PyTuple::new(py, layouts.iter().map(|specs| names(specs)).collect::<PyResult<Vec<_>>>()?)
        };
        (names(&found.cuts)?, all(&found.layouts)?, all(&found.local)?, texts(mesh, &found.summed)).into_pyobject(py)
    })
}

/// An op: its rule, when layouts go through it, and the numbers of its values.
type Op3<'py> = (PyRef<'py, FactorRule>, String, Vec<usize>);

/// The layout of each value of a computation, none where nothing cuts it. `starts` has the layout of each value and whether it
/// may take more axes, or none; the first `inputs` values are given.
#[pyfunction]
#[pyo3(signature = (mesh, shapes, starts, inputs, ops, outputs, /))]
pub(crate) fn propagated<'py>(
    py: Python<'py>,
    mesh: &Mesh,
    shapes: &Bound<'py, PyAny>,
    starts: &Bound<'py, PyAny>,
    inputs: usize,
    ops: &Bound<'py, PyAny>,
    outputs: Vec<usize>,
) -> PyResult<Bound<'py, PyTuple>> {
    guard(|| {
        let shapes = listed("shapes", shapes)?;
        let shapes: Vec<&[i64]> = shapes.iter().map(Vec::as_slice).collect();
        let start = |start: PyResult<Bound<'py, PyAny>>| {
            let start = start?;
            if start.is_none() {
                return Ok(None);
            }
            let (layout, open): (Bound<'py, PyAny>, bool) = start.extract()?;
            Ok(specs(&mesh.core, &layout)?.map(|specs| Start { specs, open }))
        };
        let starts = starts.try_iter()?.map(start).collect::<PyResult<Vec<_>>>()?;
        let way = |name: &str| match name {
            "alike" => Ok(Way::Alike),
            "first" => Ok(Way::First),
            "forward" => Ok(Way::Forward),
            "broadcast" => Ok(Way::Broadcast),
            "later" => Ok(Way::Later),
            other => Err(PyValueError::new_err(format!("way is {other:?}"))),
        };
        let node = |op: PyResult<Bound<'py, PyAny>>| {
            let (rule, name, values): Op3<'py> = op?.extract()?;
            Ok(Node { rule: rule.core.clone(), way: way(&name)?, values })
        };
        let nodes = ops.try_iter()?.map(node).collect::<PyResult<Vec<Node>>>()?;
        let ranked = |(value, start): (usize, &Option<Start>)| {
            start.as_ref().is_none_or(|start| start.specs.len() == shapes[value].len())
        };
        let in_range = |node: &Node| {
            let ranks = |(tensor, value): (usize, &usize)| {
                shapes.get(*value).is_some_and(|shape| shape.len() == node.rule.rank(tensor))
            };
            node.values.len() == node.rule.tensors() && node.values.iter().enumerate().all(ranks)
        };
        let fits = starts.len() == shapes.len()
            && starts.iter().enumerate().all(ranked)
            && nodes.iter().all(in_range)
            && outputs.iter().all(|value| *value < shapes.len());
        if !fits {
            return Err(PyValueError::new_err("shapes, starts, ops and outputs must be of the same values"));
        }
        let core = &mesh.core;
        let found = py.detach(|| layouts(core, &shapes, &starts, inputs, &nodes, &outputs));
        let names = |specs: Specs| PyTuple::new(py, specs.iter().map(|spec| texts(core, spec)));
        let found = found.into_iter().map(|layout| layout.map(names).transpose());
        PyTuple::new(py, found.collect::<PyResult<Vec<_>>>()?)
    })
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
