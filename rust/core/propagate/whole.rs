//! The layouts of all values of a computation, as Shardy's passes give them.
//!
//! Ops lie on a stack, the first on top. An op whose values change puts back those that make or use them, until nothing
//! changes; and so five times, each time with more ops and directions: ops that only pass on what has one user, or many; factors
//! that pass; all but broadcasts; all.

use std::sync::Arc;

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
    /// An edge into a call or a loop, or out of it, from one value or several into one: first, both ways, however many use them.
    Edge,
    /// A constraint on a layout: as one that is elementwise, but its operand takes the layout of its result.
    Constraint,
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
    /// Which dims may take more.
    pub open: Vec<bool>,
    /// When each dim gets its axes: those of 0 first, and only when nothing changes any more the others, in their order.
    pub priorities: Vec<u32>,
}

/// A computation as layouts go through it: values, ops, results.
///
/// The numbers of values must be in range, and an op's operands made before it.
#[derive(Debug, Clone, Copy)]
pub struct Flow<'a> {
    /// The mesh of all layouts.
    pub mesh: &'a Arc<Mesh>,
    /// The shape of each value.
    pub shapes: &'a [&'a [i64]],
    /// The layout that each begins with.
    pub starts: &'a [Option<Start>],
    /// The value whose layout each has: itself, or that of the edge into a loop from which its body takes it.
    pub same: &'a [usize],
    /// The number of values that are given, which are the first.
    pub inputs: usize,
    /// The ops in order.
    pub nodes: &'a [Node],
    /// An edge from each value that is a result to the number that the result has.
    pub outputs: &'a [Node],
}

/// A value on the way.
#[derive(Default)]
struct Value {
    specs: Option<Specs>,
    closed: Vec<bool>,
    /// The axes that it keeps free.
    kept: Vec<SubAxis>,
    /// The op that makes it.
    maker: Option<usize>,
    /// Those that use it, last to first, as often as they do.
    users: Vec<usize>,
    /// Those within a loop that do.
    inner: Vec<usize>,
    /// The number of uses of the value itself, as a result of the computation too.
    uses: usize,
}

/// The number of rounds.
const ROUNDS: usize = 5;

/// The layout of each value of a computation, none where nothing cuts it.
#[must_use]
pub fn layouts(flow: Flow<'_>) -> Vec<Option<Specs>> {
    let mut values: Vec<Value> =
        flow.shapes.iter().zip(flow.starts).map(|(shape, start)| Value::new(shape.len(), start.as_ref())).collect();
    for (number, node) in flow.nodes.iter().enumerate() {
        let (operands, results) = node.values.split_at(node.rule.operands());
        for operand in operands {
            values[*operand].uses += 1;
            let owner = &mut values[flow.same[*operand]];
            let users = if flow.same[*operand] == *operand { &mut owner.users } else { &mut owner.inner };
            users.push(number);
        }
        for result in results {
            values[*result].maker = Some(number);
        }
    }
    for value in &mut values {
        value.users.reverse();
        value.inner.reverse();
    }
    for output in flow.outputs {
        values[output.values[0]].uses += 1;
    }
    let shared = |node: &Node| {
        let many = |value: &usize| values[*value].uses != 1 && !flow.shapes[*value].is_empty();
        node.way != Way::Edge && node.values[..node.rule.operands()].iter().any(many)
    };
    let shared: Vec<bool> = flow.nodes.iter().map(shared).collect();
    let mut priorities: Vec<u32> = flow.starts.iter().flatten().flat_map(|start| start.priorities.clone()).collect();
    priorities.push(0);
    priorities.sort_unstable();
    priorities.dedup();
    for priority in priorities {
        for (value, start) in values.iter_mut().zip(flow.starts) {
            if let Some(start) = start {
                value.give(start, priority);
            }
        }
        for round in 0..ROUNDS {
            to_results(flow, &mut values);
            pass(flow, &shared, &mut values, round);
            to_results(flow, &mut values);
        }
    }
    let mut at_border: Vec<bool> = (0..values.len()).map(|number| number < flow.inputs).collect();
    for output in flow.outputs {
        at_border[output.values[1]] = true;
    }
    let found = |number: usize| {
        let value = &values[flow.same[number]];
        let specs = value.specs.clone()?;
        let even = || whole_axes(divided(specs.clone(), flow.shapes[number]), &value.closed, flow.mesh);
        Some(if at_border[number] { even() } else { specs })
    };
    (0..values.len()).map(found).collect()
}

impl Value {
    /// One whose dims of priority 0 have their axes; those of the others are kept free.
    fn new(rank: usize, start: Option<&Start>) -> Self {
        let Some(start) = start else { return Self { closed: vec![false; rank], ..Self::default() } };
        let later = |dim: &usize| start.priorities[*dim] > 0;
        let kept = (0..rank).filter(later).flat_map(|dim| start.specs[dim].clone()).collect();
        let specs = Some(vec![Vec::new(); rank]);
        Self { specs, closed: vec![true; rank], kept, ..Self::default() }
    }

    /// Gives the dims of this priority their axes.
    fn give(&mut self, start: &Start, priority: u32) {
        let Some(specs) = &mut self.specs else { return };
        for dim in (0..specs.len()).filter(|dim| start.priorities[*dim] == priority) {
            self.kept.retain(|axis| !start.specs[dim].contains(axis));
            (specs[dim], self.closed[dim]) = (start.specs[dim].clone(), !start.open[dim]);
        }
    }
}

/// Lets values and the results that they are agree.
fn to_results(flow: Flow<'_>, values: &mut [Value]) {
    for output in flow.outputs {
        visit(flow, output, false, values, ROUNDS - 1);
    }
}

/// Goes through all ops once, and again through those whose values change.
fn pass(flow: Flow<'_>, shared: &[bool], values: &mut [Value], round: usize) {
    let mut stack: Vec<usize> = (0..flow.nodes.len()).rev().collect();
    let mut waiting = vec![true; flow.nodes.len()];
    while let Some(number) = stack.pop() {
        waiting[number] = false;
        for value in visit(flow, &flow.nodes[number], shared[number], values, round) {
            let value = &values[value];
            for other in value.inner.iter().chain(&value.maker).chain(&value.users) {
                if *other != number && !std::mem::replace(&mut waiting[*other], true) {
                    stack.push(*other);
                }
            }
        }
    }
}

/// Lets the values of an op agree; which of them have changed.
fn visit(flow: Flow<'_>, node: &Node, shared: bool, values: &mut [Value], round: usize) -> Vec<usize> {
    let rule = &node.rule;
    if node.values.iter().all(|value| values[flow.same[*value]].specs.is_none()) {
        return Vec::new();
    }
    let direction = |factor: usize| direction(node.way, rule.factors()[factor].kind, shared, round);
    let of = |(tensor, value): (usize, &usize)| {
        let value = &values[flow.same[*value]];
        project::project_closed(rule, tensor, value.specs.as_ref(), &value.closed)
    };
    let mut tensors: Vec<project::Tensor> = node.values.iter().enumerate().map(of).collect();
    let kept: Vec<&[SubAxis]> = node.values.iter().map(|value| values[flow.same[*value]].kept.as_slice()).collect();
    let changed =
        agree::agree(rule, &mut tensors, matches!(node.way, Way::Alike | Way::Constraint), flow.mesh, &kept, direction);
    let mut found = Vec::new();
    for (tensor, number) in node.values.iter().enumerate().filter(|(tensor, _)| changed[*tensor]) {
        let (specs, closed) = project::layout_and_closed(rule, tensor, &tensors[tensor]);
        let value = &mut values[flow.same[*number]];
        let same = match &value.specs {
            Some(before) => *before == specs && value.closed == closed,
            None => specs.iter().all(Vec::is_empty),
        };
        if !same {
            (value.specs, value.closed) = (Some(specs), closed);
            found.push(flow.same[*number]);
        }
    }
    found
}

/// Which way the cut of a factor goes in a round: the ways of that round and of those before it.
fn direction(way: Way, kind: Kind, shared: bool, round: usize) -> Direction {
    let broadcast = if way == Way::Broadcast { Direction::Backward } else { Direction::Both };
    let early = match way {
        Way::Alike | Way::First | Way::Edge | Way::Constraint => Direction::Both,
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
