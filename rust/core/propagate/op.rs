//! The layouts and cuts with which an op computes.

use super::{
    axes,
    meet::Cuts,
    project::{self, Specs, of_cuts},
};
use crate::{
    factor::rule::{Kind, Rule},
    sub_axis::SubAxis,
};

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

/// The layouts and cuts with which an op computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    /// The axes that cut each factor while it computes.
    pub cuts: Vec<Vec<SubAxis>>,
    /// The layout of each operand and result while it computes, where it is another than its value has.
    pub local: Vec<Option<Specs>>,
    /// The axes over which its results are addends then.
    pub summed: Vec<SubAxis>,
    /// For a reshape the layouts with which a device can compute, where they are not those: without the cuts of what only one
    /// side has.
    pub possible: Vec<Option<Specs>>,
}

impl Lowered {
    /// An op that computes with these cuts, and tensors of these layouts where they are others than those of its values.
    pub(super) fn new(rule: &Rule, cuts: Cuts, local: Vec<Option<Specs>>, reshapes: bool) -> Self {
        let possible = if reshapes { possible(rule, &cuts) } else { vec![None; rule.tensors()] };
        Self { local, summed: axes::sorted(summed(rule, &cuts)), possible, cuts }
    }
}

/// The axes that cut factors which are summed.
pub(super) fn summed(rule: &Rule, cuts: &[Vec<SubAxis>]) -> Vec<SubAxis> {
    let summed = rule.factors().iter().zip(cuts).filter(|(factor, _)| factor.kind == Kind::Sum);
    summed.flat_map(|(_, axes)| axes.iter().copied()).collect()
}

/// The layouts of a reshape without the cuts of factors that only one side has, or that do not divide and are not alone in
/// their dims, and of what comes after them, or after a factor that is not cut, in a dim of either side.
fn possible(rule: &Rule, cuts: &[Vec<SubAxis>]) -> Vec<Option<Specs>> {
    let count = rule.tensors();
    let in_both = |factor: usize| (0..2).all(|tensor| rule.has(tensor, factor));
    let alone = |factor: usize| {
        let has = |dim: &&[u32]| dim.iter().any(|other| *other as usize == factor);
        (0..2).flat_map(|tensor| rule.dims(tensor)).filter(has).all(|dim| dim.len() == 1)
    };
    let mut kept = cuts.to_vec();
    for (factor, cut) in kept.iter_mut().enumerate() {
        let divides = cut
            .iter()
            .try_fold(rule.factors()[factor].size, |left, part| (left % part.size == 0).then_some(left / part.size));
        if !cut.is_empty() && (!in_both(factor) || (divides.is_none() && !alone(factor))) {
            cut.clear();
        }
    }
    project::in_one_piece(rule, &mut kept);
    if kept == cuts {
        return vec![None; count];
    }
    (0..count)
        .map(|tensor| {
            let layout = of_cuts(rule, tensor, &kept);
            (layout != of_cuts(rule, tensor, cuts)).then_some(layout)
        })
        .collect()
}
