//! An op with the layouts of its tensors, and how it computes.

use std::sync::Arc;

use super::project;
use crate::{
    factor::rule::{Kind, Rule},
    mesh::Mesh,
    sub_axis::SubAxis,
};

pub use project::Specs;

/// The ways to decide where layouts disagree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// A disagreement is an error, as in JAX's explicit mode.
    Explicit,
    /// The rules of Shardy's passes.
    Shardy,
    /// The fewest bytes that a device receives.
    Least,
}

/// An op with the layouts of its tensors.
#[derive(Debug, Clone, Copy)]
pub struct Op<'a> {
    /// The mesh of all layouts.
    pub mesh: &'a Arc<Mesh>,
    /// The rule of the op, of known sizes.
    pub rule: &'a Rule,
    /// The shapes of operands and results.
    pub shapes: &'a [&'a [i64]],
    /// Their layouts; of none, the policy gives one.
    pub layouts: &'a [Option<Specs>],
    /// The bytes of an element of each.
    pub itemsizes: &'a [i64],
    /// The axes over which the results stay addends.
    pub kept: &'a [SubAxis],
}

/// The cuts and layouts with which an op computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The axes that cut each factor while it computes.
    pub cuts: Vec<Vec<SubAxis>>,
    /// The layout of each operand before, and of each result after what has to move.
    pub layouts: Vec<Specs>,
    /// The layout of each tensor while it computes.
    pub local: Vec<Specs>,
    /// The axes over which its results are addends then.
    pub summed: Vec<SubAxis>,
}

impl Settled {
    pub(super) fn new(rule: &Rule, cuts: Vec<Vec<SubAxis>>, layouts: Vec<Specs>) -> Self {
        let local = (0..rule.tensors()).map(|tensor| of_cuts(rule, tensor, &cuts)).collect();
        let summed = rule.factors().iter().zip(&cuts).filter(|(factor, _)| factor.kind == Kind::Sum);
        let summed = summed.flat_map(|(_, axes)| axes.iter().copied()).collect();
        Self { cuts, layouts, local, summed }
    }
}

/// The layout of a tensor whose factors have these cuts.
pub(super) fn of_cuts(rule: &Rule, tensor: usize, cuts: &[Vec<SubAxis>]) -> Specs {
    let mut projected = project::project(rule, tensor, None, true);
    for (cut, axes) in projected.iter_mut().zip(cuts) {
        if let Some(cut) = cut {
            cut.axes.clone_from(axes);
        }
    }
    project::layout(rule, tensor, &projected)
}
