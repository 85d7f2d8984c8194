//! What the tensors of an op take over from one another (Shardy's aggressive strategy).

use super::{
    axes::{self, Prefix},
    project::{Cut, Tensor},
};
use crate::{factor::rule::Rule, mesh::Mesh, sub_axis::SubAxis};

/// The axes that the cuts of a factor have in common, each the longer one where one begins the other.
fn common<'a>(cuts: impl Iterator<Item = &'a Cut>) -> Vec<SubAxis> {
    cuts.fold((Vec::new(), true), |(common, grows), cut| joined(&common, &cut.axes, grows)).0
}

/// What two lists have in common; where they have parted once, nothing that comes later is added.
fn joined(ours: &[SubAxis], theirs: &[SubAxis], grows: bool) -> (Vec<SubAxis>, bool) {
    let agreed = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    let mut kept = ours[..agreed].to_vec();
    let (ours, theirs) = (&ours[agreed..], &theirs[agreed..]);
    let begins = |part: SubAxis, axis: SubAxis| axes::prefix(&[part], &[axis]) == Prefix::Strict;
    match (ours, theirs) {
        ([a, tail @ ..], [b, more @ ..]) if begins(*b, *a) => {
            if !more.is_empty() {
                kept.push(*b);
                return (kept, false);
            }
            kept.push(*a);
            kept.extend(tail);
        }
        ([a, tail @ ..], [b, more @ ..]) if begins(*a, *b) => {
            if !grows || !tail.is_empty() {
                kept.push(*a);
                return (kept, false);
            }
            kept.push(*b);
            kept.extend(more);
        }
        ([_, ..], [_, ..]) => return (kept, false),
        (rest, []) => kept.extend(rest),
        ([], rest) => {
            if grows {
                kept.extend(rest);
            }
        }
    }
    (kept, grows)
}

/// The part of `axis` that a tensor can take into the cut of a factor after `before` shards of it.
fn fits(axis: SubAxis, cut: &Cut, before: i64, size: i64) -> Option<SubAxis> {
    if cut.axes.iter().any(|own| axes::contains(*own, axis)) {
        return Some(axis);
    }
    if !cut.closed && cut.overflow.is_empty() {
        if cut.minor {
            return Some(axis);
        }
        if size % before == 0 {
            let common = gcd(size / before, axis.size);
            if common == axis.size {
                return Some(axis);
            }
            if common != 1 {
                return Some(SubAxis { size: common, ..axis });
            }
        }
    }
    cut.axes.last().copied().filter(|last| axes::prefix(&[*last], &[axis]) != Prefix::Not)
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The list up to where `keep` keeps less than a whole axis.
fn truncated(list: &[SubAxis], keep: impl Fn(SubAxis, i64) -> Option<SubAxis>) -> Vec<SubAxis> {
    let mut kept = Vec::new();
    for axis in list {
        let part = keep(*axis, axes::shards(&kept));
        kept.extend(part);
        if part != Some(*axis) {
            break;
        }
    }
    kept
}

/// Lets each tensor take over what the others have; whether any did.
///
/// Conflicts are decided by the size of the tensor that an axis comes from, then, if all tensors are `alike`, by the number
/// of shards, then by its position and the factor's.
pub(crate) fn agree(rule: &Rule, tensors: &mut [Tensor], alike: bool, mesh: &Mesh) -> bool {
    let factors = rule.factors();
    let shared: Vec<Vec<SubAxis>> = (0..factors.len())
        .map(|factor| {
            if factors[factor].blocked {
                Vec::new()
            } else {
                common(tensors.iter().filter_map(|cuts| cuts[factor].as_ref()))
            }
        })
        .collect();
    if shared.iter().all(Vec::is_empty) {
        return false;
    }
    // The largest tensor that each factor's axes come from.
    let mut source = vec![(-1_i64, usize::MAX); factors.len()];
    for (position, cuts) in tensors.iter().enumerate() {
        let held = cuts.iter().zip(factors).filter(|(cut, _)| cut.is_some());
        let size = held.fold(1_i64, |size, (_, factor)| size.saturating_mul(factor.size));
        for (factor, cut) in cuts.iter().enumerate() {
            let Some(cut) = cut else { continue };
            let is_source = !shared[factor].is_empty() && axes::prefix(&shared[factor], &cut.axes) != Prefix::Not;
            if is_source && size > source[factor].0 {
                source[factor] = (size, position);
            }
        }
    }
    let mut order: Vec<usize> = (0..factors.len()).collect();
    order.sort_by_key(|&factor| {
        let shards = if alike { axes::shards(&shared[factor]) } else { 0 };
        (-source[factor].0, -shards, source[factor].1, factor)
    });
    let mut changed = false;
    let operands = rule.operands();
    for position in (operands..tensors.len()).chain(0..operands) {
        for &factor in &order {
            let cuts = &tensors[position];
            let Some(cut) = &cuts[factor] else { continue };
            let mut new = truncated(&shared[factor], |axis, before| fits(axis, cut, before, factors[factor].size));
            if axes::prefix(&cut.axes, &new) != Prefix::Strict {
                continue;
            }
            for other in
                cuts.iter().enumerate().filter(|(other, _)| *other != factor).filter_map(|(_, cut)| cut.as_ref())
            {
                axes::cut_off(&mut new, &other.overflow, mesh);
                axes::cut_off(&mut new, &other.axes, mesh);
            }
            if alike && position < operands {
                for result in &tensors[operands..] {
                    if let Some(result) = &result[factor]
                        && axes::prefix(&result.axes, &new) == Prefix::Strict
                    {
                        new = result.axes.clone();
                    }
                }
            }
            let Some(cut) = &mut tensors[position][factor] else { continue };
            if axes::prefix(&cut.axes, &new) == Prefix::Strict {
                cut.axes = new;
                changed = true;
            }
        }
    }
    changed
}
