//! Agreement: what the tensors of an op take over from one another (Shardy's aggressive strategy).

use super::{
    axes::{self, Prefix},
    project::{Cut, Tensor},
};
use crate::{factor::rule::Rule, mesh::Mesh, radix, short, sub_axis::SubAxis};

/// The directions in which the cut of a factor is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Nowhere,
    Forward,
    Backward,
    Both,
}

impl Direction {
    /// Either way that one of the two allows.
    pub(crate) fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nowhere, other) => other,
            (own, Self::Nowhere) => own,
            (own, other) if own == other => own,
            _ => Self::Both,
        }
    }
}

/// The axes that the cuts of a factor have in common, each the longer one where one begins the other: those of operands and
/// results alike, or of one side, shortened by those of the other.
#[inline]
fn common(factor: usize, operands: &[Tensor], results: &[Tensor], direction: Direction) -> Vec<SubAxis> {
    let (first, second) = match direction {
        Direction::Nowhere => return Vec::new(),
        Direction::Forward | Direction::Both => (operands, results),
        Direction::Backward => (results, operands),
    };
    let join = |(common, grows): (Vec<SubAxis>, bool), cuts: &Tensor| match &cuts[factor] {
        Some(cut) => joined(&common, &cut.axes, grows),
        None => (common, grows),
    };
    let (common, grows) = first.iter().fold((Vec::new(), true), join);
    second.iter().fold((common, grows && direction == Direction::Both), join).0
}

/// The part that two lists have in common; where they have parted once, nothing that comes later is added.
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

/// The part of `axis` that a tensor, which keeps some axes free, can take into the cut of a factor after `before` shards of it.
fn fits(axis: SubAxis, cut: &Cut, kept: &[SubAxis], before: i64, size: i64, mesh: &Mesh) -> Option<SubAxis> {
    let axis = axes::free_part(axis, kept, mesh)?;
    if cut.axes.iter().any(|own| axes::contains(*own, axis)) {
        return Some(axis);
    }
    if !cut.closed && cut.overflow.is_empty() {
        if cut.minor {
            return Some(axis);
        }
        if size % before == 0 {
            let common = radix::gcd(size / before, axis.size);
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

/// Lets each tensor take over what the others have, in the `direction` of each factor, but for the axes that it keeps free
/// (`kept`, or nothing for none); which did.
///
/// Conflicts are decided by the size of the tensor that an axis comes from, then, if all tensors are `alike`, by the number
/// of shards, then by its position and the factor's.
pub(crate) fn agree(
    rule: &Rule,
    tensors: &mut [Tensor],
    alike: bool,
    mesh: &Mesh,
    kept: &[&[SubAxis]],
    direction: impl Fn(usize) -> Direction,
) -> Vec<bool> {
    let factors = rule.factors();
    let mut changed = vec![false; tensors.len()];
    let (operands, results) = tensors.split_at(rule.operands());
    let shared: Vec<Vec<SubAxis>> = (0..factors.len())
        .map(|factor| {
            let blocked = factors[factor].blocked;
            let direction = if blocked { Direction::Nowhere } else { direction(factor) };
            common(factor, operands, results, direction)
        })
        .collect();
    if shared.iter().all(Vec::is_empty) {
        return changed;
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
    short::sort_by_key(&mut order, |&factor| {
        let shards = if alike { axes::shards(&shared[factor]) } else { 0 };
        (-source[factor].0, -shards, source[factor].1, factor)
    });
    let operands = rule.operands();
    for position in (operands..tensors.len()).chain(0..operands) {
        for &factor in &order {
            let cuts = &tensors[position];
            let Some(cut) = &cuts[factor] else { continue };
            let kept = kept.get(position).copied().unwrap_or_default();
            let size = factors[factor].size;
            let mut new = truncated(&shared[factor], |axis, before| fits(axis, cut, kept, before, size, mesh));
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
                changed[position] = true;
            }
        }
    }
    changed
}
