//! The ops of a computation, with a copy of a constant, and of what is made of constants or of one scalar, for each use.

use std::collections::{HashMap, HashSet};

use crate::{
    computation::{Computation, Does, Op},
    factor::is_elementwise,
};

/// An op of a computation, or a copy of one.
pub(super) struct Step {
    pub(super) op: usize,
    pub(super) operands: Vec<usize>,
    pub(super) results: Vec<usize>,
}

/// The ops of a computation, with a copy of a constant, and of what is made of constants, for each use.
pub(super) struct Copies {
    pub(super) steps: Vec<Step>,
    pub(super) outputs: Vec<usize>,
    /// The value of which each is a copy, or itself.
    pub(super) originals: Vec<usize>,
}

/// The ops of a computation, and copies of them, on the way.
struct Copying<'a> {
    computation: &'a Computation,
    /// For each value the op that makes it.
    makers: Vec<Option<usize>>,
    /// The ops that are copied for each use.
    copied: Vec<bool>,
    /// For each op itself, then its copies.
    at: Vec<Vec<Step>>,
    originals: Vec<usize>,
}

impl Copies {
    pub(super) fn new(computation: &Computation) -> Self {
        let count = computation.shapes.len();
        let mut copying = Copying {
            computation,
            makers: vec![None; count],
            copied: vec![false; computation.ops.len()],
            at: Vec::with_capacity(computation.ops.len()),
            originals: (0..count).collect(),
        };
        let mut constants = vec![false; computation.ops.len()];
        for (number, op) in computation.ops.iter().enumerate() {
            let constant = |value: &usize| copying.makers[*value].is_some_and(|maker| constants[maker]);
            constants[number] = is_constant(op) || is_preserving(op) && op.operands.iter().all(constant);
            copying.copied[number] = constants[number] || copying.spreads(op);
            for result in &op.results {
                copying.makers[*result] = Some(number);
            }
            let operands = if copying.copied[number] {
                op.operands.clone()
            } else {
                op.operands.iter().map(|value| copying.taken(*value)).collect()
            };
            copying.at.push(vec![Step { op: number, operands, results: op.results.clone() }]);
        }
        let outputs: Vec<usize> = computation.outputs.iter().map(|value| copying.taken(*value)).collect();
        let Copying { copied, at, originals, .. } = copying;
        let mut used = vec![false; originals.len()];
        for output in &outputs {
            used[*output] = true;
        }
        let mut steps = Vec::with_capacity(at.len());
        for (number, mut versions) in at.into_iter().enumerate().rev() {
            // What is copied for each use is not there itself, unless a scalar.
            versions[1..].reverse();
            for step in versions {
                if !copied[number] || step.results.iter().any(|result| used[*result]) {
                    for operand in &step.operands {
                        used[*operand] = true;
                    }
                    steps.push(step);
                }
            }
        }
        steps.reverse();
        Self { steps, outputs, originals }
    }
}

impl Copying<'_> {
    /// True if it makes a tensor of one scalar.
    fn spreads(&self, op: &Op) -> bool {
        let is_broadcast = matches!(&op.does, Does::Rule(ruled) if ruled.name == "broadcast_in_dim");
        is_broadcast && self.computation.shapes[op.operands[0]].is_empty()
    }

    /// The number of a new copy of a value, or its own if it is not copied.
    fn taken(&mut self, value: usize) -> usize {
        let shapes = &self.computation.shapes;
        let made = |value: usize| self.makers[value].filter(|_| !shapes[value].is_empty());
        let Some(maker) = made(value).filter(|maker| self.copied[*maker]) else { return value };
        // All ops that it is made by, in order; scalars are not copied.
        let (mut ops, mut waiting) = (HashSet::from([maker]), vec![maker]);
        while let Some(op) = waiting.pop() {
            let makers = self.computation.ops[op].operands.iter().filter_map(|operand| made(*operand));
            waiting.extend(makers.filter(|maker| ops.insert(*maker)));
        }
        let mut ops: Vec<usize> = ops.into_iter().collect();
        ops.sort_unstable();
        let mut copies: HashMap<usize, usize> = HashMap::new();
        for number in ops {
            let op = &self.computation.ops[number];
            let operands = op.operands.iter().map(|operand| *copies.get(operand).unwrap_or(operand)).collect();
            let results = (self.originals.len()..).take(op.results.len()).collect();
            for result in &op.results {
                copies.insert(*result, self.originals.len());
                self.originals.push(*result);
            }
            self.at[number].push(Step { op: number, operands, results });
        }
        copies[&value]
    }
}

fn is_constant(op: &Op) -> bool {
    matches!(op.does, Does::Constant)
}

/// Says whether an op gives constants for constants.
fn is_preserving(op: &Op) -> bool {
    match &op.does {
        Does::Call(body) => body.ops.iter().all(|inner| is_constant(inner) || is_preserving(inner)),
        Does::Constraint(..) => true,
        Does::Rule(ruled) => {
            is_elementwise(&ruled.name) || matches!(ruled.name.as_str(), "broadcast_in_dim" | "reshape" | "slice")
        }
        Does::Constant | Does::Barrier | Does::Loop(..) | Does::While(..) | Does::Case(..) => false,
    }
}
