//! The layouts of all values of a computation, as Shardy's passes give them.
//!
//! Ops lie on a stack, the first on top. An op whose values change puts back those that make or use them, until nothing
//! changes; and so five times, each time with more ops and directions: ops that only pass on what has one user, or many; factors
//! that pass; all but broadcasts; all.

use super::{
    agree::{self, Direction},
    axes,
    project::{self, Specs},
};
use crate::{
    factor::rule::{Kind, Rule},
    mesh::Mesh,
    sub_axis::SubAxis,
};

/// In which round, and in which direction, layouts go through an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Elementwise: first, both ways; its tensors are alike.
    Alike,
    /// A reshape or a transpose: first, both ways.
    First,
    /// A slice at a place that only the run tells, or an update of one: first, forward.
    Forward,
    /// A broadcast: backward before forward.
    Broadcast,
    /// All others.
    Later,
}

/// An op of a computation.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its rule, of known sizes.
    pub rule: Rule,
    /// When layouts go through it.
    pub way: Way,
    /// The numbers of its operands, then of its results.
    pub values: Vec<usize>,
}

/// The layout that a value begins with.
#[derive(Debug, Clone)]
pub struct Start {
    /// The axes of its dims.
    pub specs: Specs,
    /// True if it may take more.
    pub open: bool,
}

/// A value on the way.
struct Value {
    specs: Option<Specs>,
    closed: Vec<bool>,
    /// The op that makes it.
    maker: Option<usize>,
    /// Those that use it, last to first, as often as they do.
    users: Vec<usize>,
    /// The number of its uses, as a result of the computation too.
    uses: usize,
}

/// The number of rounds.
const ROUNDS: usize = 5;

/// The layout of each value of a computation, none where nothing cuts it; `shapes` and `starts` are of all values, of which the
/// first `inputs` are given, and `outputs` are the results.
///
/// The numbers of values in `nodes` and `outputs` must be in range, and an op's operands made before it.
#[must_use]
pub fn layouts(
    mesh: &Mesh,
    shapes: &[&[i64]],
    starts: &[Option<Start>],
    inputs: usize,
    nodes: &[Node],
    outputs: &[usize],
) -> Vec<Option<Specs>> {
    let mut values: Vec<Value> = shapes
        .iter()
        .zip(starts)
        .map(|(shape, start)| Value {
            specs: start.as_ref().map(|start| start.specs.clone()),
            closed: vec![start.as_ref().is_some_and(|start| !start.open); shape.len()],
            maker: None,
            users: Vec::new(),
            uses: 0,
        })
        .collect();
    for (number, node) in nodes.iter().enumerate() {
        let (operands, results) = node.values.split_at(node.rule.operands());
        for operand in operands {
            values[*operand].users.insert(0, number);
            values[*operand].uses += 1;
        }
        for result in results {
            values[*result].maker = Some(number);
        }
    }
    for output in outputs {
        values[*output].uses += 1;
    }
    for round in 0..ROUNDS {
        while pass(mesh, nodes, &mut values, round) {}
    }
    let border = |(number, value): (usize, Value)| {
        let specs = value.specs?;
        Some(if number < inputs { whole_axes(divided(specs, shapes[number]), &value.closed, mesh) } else { specs })
    };
    values.into_iter().enumerate().map(border).collect()
}

/// Goes through all ops once, and again through those whose values change; whether any did.
fn pass(mesh: &Mesh, nodes: &[Node], values: &mut [Value], round: usize) -> bool {
    let mut stack: Vec<usize> = (0..nodes.len()).rev().collect();
    let mut waiting = vec![true; nodes.len()];
    let mut changed = false;
    while let Some(number) = stack.pop() {
        waiting[number] = false;
        for value in visit(mesh, &nodes[number], values, round) {
            changed = true;
            let value = &values[value];
            for other in value.maker.iter().chain(&value.users) {
                if *other != number && !std::mem::replace(&mut waiting[*other], true) {
                    stack.push(*other);
                }
            }
        }
    }
    changed
}

/// Lets the values of an op agree; which of them have changed.
fn visit(mesh: &Mesh, node: &Node, values: &mut [Value], round: usize) -> Vec<usize> {
    let rule = &node.rule;
    let shared = node.values[..rule.operands()]
        .iter()
        .any(|value| values[*value].uses != 1 && !values[*value].closed.is_empty());
    let direction = |factor: usize| direction(node.way, rule.factors()[factor].kind, shared, round);
    let of = |(tensor, value): (usize, &usize)| {
        let value = &values[*value];
        project::project_closed(rule, tensor, value.specs.as_ref(), &value.closed)
    };
    let mut tensors: Vec<project::Tensor> = node.values.iter().enumerate().map(of).collect();
    let changed = agree::agree(rule, &mut tensors, node.way == Way::Alike, mesh, direction);
    let mut found = Vec::new();
    for (tensor, number) in node.values.iter().enumerate().filter(|(tensor, _)| changed[*tensor]) {
        let (specs, closed) = project::layout_and_closed(rule, tensor, &tensors[tensor]);
        let value = &mut values[*number];
        let same = match &value.specs {
            Some(before) => *before == specs && value.closed == closed,
            None => specs.iter().all(Vec::is_empty),
        };
        if !same {
            (value.specs, value.closed) = (Some(specs), closed);
            found.push(*number);
        }
    }
    found
}

/// Which way the cut of a factor goes in a round: the ways of that round and of those before it.
fn direction(way: Way, kind: Kind, shared: bool, round: usize) -> Direction {
    let broadcast = if way == Way::Broadcast { Direction::Backward } else { Direction::Both };
    let early = match way {
        Way::Alike | Way::First => Direction::Both,
        Way::Forward => Direction::Forward,
        Way::Broadcast | Way::Later => Direction::Nowhere,
    };
    let of_round = |round: usize| match round {
        0 if shared => Direction::Nowhere,
        0 | 1 => early,
        2 if kind != Kind::Pass => Direction::Nowhere,
        2 | 3 => broadcast,
        _ => Direction::Both,
    };
    (0..=round).map(of_round).fold(Direction::Nowhere, Direction::or)
}

/// The part of a layout that cuts a shape evenly.
fn divided(specs: Specs, shape: &[i64]) -> Specs {
    let of_dim = |(spec, size): (Vec<SubAxis>, &i64)| {
        if size % axes::shards(&spec) == 0 {
            return spec;
        }
        let mut left = *size;
        let mut kept = Vec::new();
        for axis in spec {
            let common = gcd(axis.size, left);
            if common > 1 {
                kept.push(SubAxis { size: common, ..axis });
                left /= common;
            }
            if common != axis.size {
                break;
            }
        }
        kept
    };
    specs.into_iter().zip(shape).map(of_dim).collect()
}

/// The layout without parts of axes, and what comes after them, in dims that may take more.
fn whole_axes(specs: Specs, closed: &[bool], mesh: &Mesh) -> Specs {
    let whole = |axis: &SubAxis| axis.size == mesh.sizes()[axis.axis];
    let of_dim = |(spec, closed): (Vec<SubAxis>, &bool)| {
        if *closed { spec } else { spec.into_iter().take_while(whole).collect() }
    };
    specs.into_iter().zip(closed).map(of_dim).collect()
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
