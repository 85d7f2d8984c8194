//! The layouts of all values of a computation, as Shardy's passes give them.
//!
//! Ops lie on a stack, the first on top. An op whose values change puts back those that make or use them, until nothing
//! changes; and so five times, each time with more ops and directions: ops that only pass on what has one user, or many; factors
//! that pass; all but broadcasts; all.

use std::{rc::Rc, sync::Arc};

use super::{
    agree::{self, Direction},
    axes,
    flow::{Flow, Start},
    node::{Node, Way},
    numbered::{Map, Numbered},
    project::{self, Specs, is_whole},
    uses::Uses,
};
use crate::{factor::rule::Kind, mesh::Mesh, radix, sub_axis::SubAxis};

/// A layout on the way.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Held {
    /// The number of its axes, none those of a value that may have any.
    specs: u32,
    /// True if no axis cuts a dim.
    whole: bool,
    /// The dims that take no more axes.
    closed: Vec<bool>,
}

/// All layouts on the way, by number, and their axes.
#[derive(Default)]
struct Layouts {
    all: Numbered<Held>,
    specs: Numbered<Option<Arc<Specs>>>,
}

/// A value on the way.
#[derive(Default)]
struct Value {
    /// The number of its layout.
    held: u32,
    /// The axes that it keeps free.
    kept: Vec<SubAxis>,
    /// The number of the visit that last changed it.
    changed: usize,
}

/// The number of the last visit of an op, and the directions of then for factors that pass and for others, if nothing changed.
type Visited = Option<(usize, [Direction; 2])>;

/// The tensors of an op that take other layouts, and which.
type Taken = Rc<[(usize, u32)]>;

/// All values and ops on the way.
struct Passes<'a> {
    flow: &'a Flow,
    uses: &'a Uses,
    values: Vec<Value>,
    /// The visits of the flow's nodes, then of its outputs.
    ops: Vec<Visited>,
    /// The number of visits.
    visits: usize,
    layouts: Layouts,
    /// The tensors of an op that take other layouts, and which: by the layouts of all, the rule and the directions.
    agreed: Map<Box<[u32]>, Taken>,
    /// The key of the next op.
    key: Vec<u32>,
    /// True if a value keeps axes free.
    keeps: bool,
}

/// The number of rounds.
const ROUNDS: usize = 5;

/// The layout of each value of a computation, none where nothing cuts it.
pub(super) fn layouts(flow: &Flow) -> Vec<Option<Arc<Specs>>> {
    let mut passes = Passes::new(flow);
    let mut priorities: Vec<u32> = flow.starts.iter().flatten().flat_map(|start| start.priorities.clone()).collect();
    priorities.push(0);
    priorities.sort_unstable();
    priorities.dedup();
    for priority in priorities {
        passes.visits += 1;
        for (value, start) in passes.values.iter_mut().zip(&flow.starts) {
            if let Some(start) = start {
                value.give(start, priority, &mut passes.layouts);
                value.changed = passes.visits;
            }
        }
        passes.keeps = passes.values.iter().any(|value| !value.kept.is_empty());
        for round in 0..ROUNDS {
            passes.meet_results();
            passes.pass(round);
            passes.meet_results();
        }
    }
    let Passes { values, layouts, .. } = passes;
    let mut at_border: Vec<bool> = (0..values.len()).map(|number| number < flow.inputs).collect();
    for output in &flow.outputs {
        at_border[output.values[1]] = true;
    }
    let found = |number: usize| {
        let held = layouts.at(values[flow.same[number]].held);
        let specs = layouts.specs_of(held)?;
        let even = |shape| whole_axes(divided((**specs).clone(), shape), &held.closed, &flow.mesh);
        let changed = at_border[number].then(|| even(&flow.shapes[number])).filter(|even| *even != **specs);
        Some(changed.map_or_else(|| specs.clone(), Arc::new))
    };
    (0..values.len()).map(found).collect()
}

impl Layouts {
    fn number(&mut self, specs: Option<Specs>, closed: Vec<bool>) -> u32 {
        let whole = is_whole(specs.as_ref());
        let specs = self.specs.of(specs.map(Arc::new));
        self.all.of(Held { specs, whole, closed })
    }

    fn at(&self, number: u32) -> &Held {
        self.all.at(number)
    }

    fn specs_of(&self, held: &Held) -> Option<&Arc<Specs>> {
        self.specs.at(held.specs).as_ref()
    }
}

impl Value {
    /// One whose dims get their axes later; those of priorities above 0 are kept free.
    fn new(start: &Start, layouts: &mut Layouts) -> Self {
        let rank = start.specs.len();
        let later = (0..rank).filter(|dim| start.priorities[*dim] > 0);
        let kept = later.flat_map(|dim| start.specs[dim].clone()).collect();
        Self { held: layouts.number(Some(vec![Vec::new(); rank]), vec![true; rank]), kept, changed: 0 }
    }

    /// Gives the dims of this priority their axes.
    fn give(&mut self, start: &Start, priority: u32, layouts: &mut Layouts) {
        let held = layouts.at(self.held);
        let Some(mut specs) = layouts.specs_of(held).map(|specs| Specs::clone(specs)) else { return };
        let mut closed = held.closed.clone();
        for dim in (0..specs.len()).filter(|dim| start.priorities[*dim] == priority) {
            self.kept.retain(|axis| !start.specs[dim].contains(axis));
            (specs[dim], closed[dim]) = (start.specs[dim].clone(), !start.open[dim]);
        }
        self.held = layouts.number(Some(specs), closed);
    }
}

impl<'a> Passes<'a> {
    fn new(flow: &'a Flow) -> Self {
        let mut layouts = Layouts::default();
        let most = flow.shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
        let open: Vec<u32> = (0..=most).map(|rank| layouts.number(None, vec![false; rank])).collect();
        let of = |(shape, start): (&Arc<[i64]>, &Option<Arc<Start>>)| match start {
            Some(start) => Value::new(start, &mut layouts),
            None => Value { held: open[shape.len()], ..Value::default() },
        };
        let values = flow.shapes.iter().zip(&flow.starts).map(of).collect();
        let ops = vec![None; flow.nodes.len() + flow.outputs.len()];
        let uses = flow.uses.get_or_init(|| Uses::new(&flow.shapes, &flow.same, &flow.nodes, &flow.outputs));
        Self { flow, uses, values, ops, visits: 0, layouts, agreed: Map::default(), key: Vec::new(), keeps: false }
    }

    /// Lets values and the results that they are agree.
    fn meet_results(&mut self) {
        let flow = self.flow;
        for (number, output) in flow.outputs.iter().enumerate() {
            self.visit(flow.nodes.len() + number, output, ROUNDS - 1);
        }
    }

    /// Goes through all ops once, and again through those whose values change.
    fn pass(&mut self, round: usize) {
        let flow = self.flow;
        let mut stack: Vec<usize> = (0..flow.nodes.len()).rev().collect();
        let mut waiting = vec![true; flow.nodes.len()];
        while let Some(number) = stack.pop() {
            waiting[number] = false;
            for value in self.visit(number, &flow.nodes[number], round) {
                for other in &self.uses.of[value] {
                    if *other != number && !std::mem::replace(&mut waiting[*other], true) {
                        stack.push(*other);
                    }
                }
            }
        }
    }

    /// Lets the values of an op agree; which of them have changed.
    fn visit(&mut self, number: usize, node: &Node, round: usize) -> Vec<usize> {
        let Self { flow, uses, values, ops, visits, layouts, agreed, key, keeps } = self;
        let of = |value: &usize| &values[flow.same[*value]];
        let held = || node.values.iter().map(|value| layouts.at(of(value).held));
        if held().all(|held| held.whole) || node.is_even() && all_equal(held()) {
            return Vec::new();
        }
        let ways = [Kind::Pass, Kind::Whole].map(|kind| direction(node.way, kind, uses.shared[number], round));
        let since = |last: usize| node.values.iter().any(|value| of(value).changed > last);
        if ways == [Direction::Nowhere; 2] || ops[number].is_some_and(|(last, then)| then == ways && !since(last)) {
            return Vec::new();
        }
        *visits += 1;
        let alike = matches!(node.way, Way::Alike | Way::Constraint);
        key.clear();
        key.extend(node.values.iter().map(|value| of(value).held));
        key.extend([uses.rules[number], ways[0] as u32, ways[1] as u32, u32::from(alike)]);
        let free = !*keeps || node.values.iter().all(|value| of(value).kept.is_empty());
        let taken = if let Some(known) = agreed.get(&key[..]).filter(|_| free) {
            known.clone()
        } else {
            let rule = &node.ruled.rule;
            let projected = |(tensor, held): (usize, &Held)| {
                project::project_closed(rule, tensor, layouts.specs_of(held).map(|specs| &**specs), &held.closed)
            };
            let mut tensors: Vec<project::Tensor> = held().enumerate().map(projected).collect();
            let kept: Vec<&[SubAxis]> = node.values.iter().map(|value| of(value).kept.as_slice()).collect();
            let way = |factor: usize| ways[usize::from(rule.factors()[factor].kind != Kind::Pass)];
            let changed = agree::agree(rule, &mut tensors, alike, &flow.mesh, &kept, way);
            let number = |tensor: usize| {
                let (specs, closed) = project::layout_and_closed(rule, tensor, &tensors[tensor]);
                (tensor, layouts.number(Some(specs), closed))
            };
            let taken: Taken = (0..changed.len()).filter(|tensor| changed[*tensor]).map(number).collect();
            if free {
                agreed.insert(key.as_slice().into(), taken.clone());
            }
            taken
        };
        let mut found = Vec::new();
        for (tensor, held) in taken.iter() {
            let value = flow.same[node.values[*tensor]];
            // A value without a layout does not become one that nothing cuts.
            let begins = || layouts.specs_of(layouts.at(values[value].held)).is_some() || !layouts.at(*held).whole;
            if values[value].held != *held && begins() {
                (values[value].held, values[value].changed) = (*held, *visits);
                found.push(value);
            }
        }
        ops[number] = found.is_empty().then_some((*visits, ways));
        found
    }
}

/// True if all layouts that have dims have the same axes.
fn all_equal<'a>(held: impl Iterator<Item = &'a Held>) -> bool {
    let mut ranked = held.filter(|held| !held.closed.is_empty());
    let first = ranked.next();
    ranked.all(|held| Some(held.specs) == first.map(|first| first.specs))
}

/// The direction in which the cut of a factor goes in a round: by the ways of that round and of those before it.
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
            let common = radix::gcd(axis.size, left);
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
