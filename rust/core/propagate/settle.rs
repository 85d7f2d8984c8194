//! One op by itself, some of whose tensors have no layout.

use std::sync::Arc;

use super::{
    agree, least, meet,
    op::{Lowered, Policy, summed},
    project::{self, Specs},
};
use crate::{error::Result, factor::rule::Rule, mesh::Mesh, sub_axis::SubAxis};

/// An op with the layouts of its tensors.
#[derive(Debug, Clone, Copy)]
pub struct Op<'a> {
    /// The mesh of all layouts.
    pub mesh: &'a Arc<Mesh>,
    /// The rule of the op, of known sizes.
    pub rule: &'a Rule,
    /// The shapes of operands and results.
    pub shapes: &'a [&'a [i64]],
    /// The layouts of operands and results; where one has none, the policy gives one.
    pub layouts: &'a [Option<Specs>],
    /// The bytes of an element.
    pub itemsize: i64,
    /// The axes over which the results stay addends.
    pub kept: &'a [SubAxis],
}

/// The layouts of all tensors of the op, and how it computes, by a policy; none if no way leaves addends over the axes that are to
/// stay. [`Policy::Explicit`] takes all layouts as they are, and the fewest bytes.
///
/// # Errors
/// Those of a layout that does not fit its shape.
///
/// ```
/// use shardwise_core::{factor::{Kind, Reduction, Rule}, mesh::Mesh, propagate::{Op, Policy, settle}, sub_axis::SubAxis};
/// let mesh = std::sync::Arc::new(Mesh::new(&["dp", "tp"], &[2, 4])?);
/// let shapes: [&[i64]; 3] = [&[8, 16], &[16, 32], &[8, 32]];
/// let rule = Rule::parse("([i,k],[k,j])->([i,j])", &[("k", Kind::Sum)], &[], &[], Reduction::Add, &[])?.sized(&shapes)?;
/// let [dp, tp] = [SubAxis { axis: 0, before: 1, size: 2 }, SubAxis { axis: 1, before: 1, size: 4 }];
/// let layouts = [Some(vec![vec![dp], vec![]]), Some(vec![vec![], vec![tp]]), None];
/// let op = Op { mesh: &mesh, rule: &rule, shapes: &shapes, layouts: &layouts, itemsize: 4, kept: &[] };
/// assert_eq!(settle(op, Policy::Shardy)?.unwrap().0[2], [[dp], [tp]]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn settle(op: Op<'_>, policy: Policy) -> Result<Option<(Vec<Specs>, Arc<Lowered>)>> {
    let Op { mesh, rule, .. } = op;
    let given = if policy == Policy::Shardy { agreed(op) } else { op.layouts.to_vec() };
    let tensors = project::closed(rule, given.iter().map(Option::as_ref));
    let mut ways = match policy {
        Policy::Shardy => vec![meet::meet(rule, &tensors, op.shapes, mesh)],
        Policy::Explicit | Policy::Least => least::ways(mesh, rule, &tensors, None),
    };
    ways.retain(|cuts| op.kept.iter().all(|axis| summed(rule, cuts).contains(axis)));
    let lowered = |cuts: meet::Cuts| {
        let inner: Vec<Specs> = (0..rule.tensors()).map(|tensor| project::of_cuts(rule, tensor, &cuts)).collect();
        let outer = given.iter().zip(&inner).map(|(own, inner)| own.as_ref().unwrap_or(inner).clone());
        let outer: Vec<Specs> = outer.collect();
        let local = inner.into_iter().zip(&outer).map(|(inner, outer)| (inner != *outer).then_some(inner)).collect();
        (outer, Arc::new(Lowered::new(rule, cuts, local, false)))
    };
    let (mut layouts, ways): (Vec<Vec<Specs>>, Vec<Arc<Lowered>>) = ways.into_iter().map(lowered).unzip();
    let found = least::cheapest(rule, &ways, |way, tensor, summed| {
        let outer = &layouts[way][tensor];
        let inner = ways[way].local[tensor].as_ref().unwrap_or(outer);
        let summed: Vec<SubAxis> = summed.iter().copied().filter(|axis| !op.kept.contains(axis)).collect();
        let (from, to) = if tensor < rule.operands() { (outer, inner) } else { (inner, outer) };
        least::price(mesh, op.shapes[tensor], from, to, &summed, op.itemsize)
    })?;
    Ok(found.map(|found| (layouts.swap_remove(found), ways[found].clone())))
}

/// The layouts of all tensors, of which those without one take over what the others have.
fn agreed(op: Op<'_>) -> Vec<Option<Specs>> {
    let of =
        |(tensor, given): (usize, &Option<Specs>)| project::project(op.rule, tensor, given.as_ref(), given.is_some());
    let mut tensors: Vec<project::Tensor> = op.layouts.iter().enumerate().map(of).collect();
    while agree::agree(op.rule, &mut tensors, false, op.mesh, &[], |_| agree::Direction::Both).contains(&true) {}
    let layout = |(tensor, given): (usize, &Option<Specs>)| {
        Some(given.clone().unwrap_or_else(|| project::layout(op.rule, tensor, &tensors[tensor])))
    };
    op.layouts.iter().enumerate().map(layout).collect()
}
