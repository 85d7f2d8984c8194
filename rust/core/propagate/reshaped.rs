//! The layout that JAX's explicit mode gives the result of a reshape.

use super::project::Specs;
use crate::sub_axis::SubAxis;

/// The layout of what becomes of a tensor by a reshape, if it says what becomes of the cuts.
pub(super) fn reshaped(before: &[i64], after: &[i64], specs: &Specs) -> Option<Specs> {
    if specs.iter().all(Vec::is_empty) {
        return Some(vec![Vec::new(); after.len()]);
    }
    if before.iter().filter(|size| **size != 1).eq(after.iter().filter(|size| **size != 1)) {
        let mut kept = before.iter().zip(specs).filter(|(size, _)| **size != 1).map(|(_, spec)| spec);
        let of = |size: &i64| (*size != 1).then(|| kept.next().cloned()).flatten().unwrap_or_default();
        return Some(after.iter().map(of).collect());
    }
    if after.len() > before.len() {
        let groups = groups(before, after)?;
        let spread = groups.iter().zip(specs).map(|(group, spec)| match group {
            Group::Kept => Some(vec![spec.clone()]),
            Group::Split(sizes) => spread(sizes, spec),
        });
        return Some(spread.collect::<Option<Vec<_>>>()?.concat());
    }
    if after.len() == before.len() {
        return None;
    }
    let mut rest = specs.iter();
    let groups = groups(after, before)?;
    let joined = groups.iter().zip(after).map(|(group, size)| match group {
        Group::Kept => rest.next().cloned(),
        Group::Split(sizes) => {
            let own: Vec<_> = rest.by_ref().take(sizes.len()).collect();
            spread(&[*size], &joined(&own)?)?.pop()
        }
    });
    joined.collect()
}

/// A dim of a shape in a reshape to one with more dims.
enum Group {
    /// The dim stays.
    Kept,
    /// The dim becomes several of these sizes.
    Split(Vec<i64>),
}

/// The dims of the shape with fewer dims, of which at most one is split; none if there is no such way.
fn groups(few: &[i64], many: &[i64]) -> Option<Vec<Group>> {
    let (mut left, mut right) = (few, many);
    while let ([before @ .., 1], [rest @ .., 1]) = (left, right) {
        (left, right) = (before, rest);
    }
    let ones = few.len() - left.len();
    let mut found: Vec<Group> = Vec::with_capacity(few.len());
    let mut next = 0;
    while next < right.len() {
        let size = *left.get(found.len())?;
        if size == right[next] {
            found.push(Group::Kept);
        } else {
            if found.iter().any(|group| matches!(group, Group::Split(_))) {
                return None;
            }
            let mut parts = vec![right[next]];
            let mut product = right[next];
            while product != size || right.get(next + 1) == Some(&1) {
                if product > size {
                    return None;
                }
                if product == size && left.get(found.len() + 1) == Some(&right[next + 1]) {
                    break;
                }
                next += 1;
                parts.push(*right.get(next)?);
                product = product.saturating_mul(right[next]);
            }
            found.push(Group::Split(parts));
        }
        next += 1;
    }
    let all = found.len() == left.len();
    found.extend((0..ones).map(|_| Group::Kept));
    all.then_some(found)
}

/// For each of the sizes the axes that cut it, major first.
fn spread(sizes: &[i64], axes: &[SubAxis]) -> Option<Specs> {
    let mut rest = axes.iter();
    let of_size = |size: &i64| {
        let (mut left, mut own) = (*size, Vec::new());
        while left > 1 {
            let Some(axis) = rest.next() else { break };
            if left % axis.size != 0 {
                return None;
            }
            left /= axis.size;
            own.push(*axis);
        }
        Some(own)
    };
    sizes.iter().map(of_size).collect()
}

/// The axes of dims that are joined; a dim that is whole must not come before one that is cut.
fn joined(specs: &[&Vec<SubAxis>]) -> Option<Vec<SubAxis>> {
    let cut = specs.iter().take_while(|spec| !spec.is_empty()).count();
    let rest_is_whole = specs[cut..].iter().all(|spec| spec.is_empty());
    rest_is_whole.then(|| specs[..cut].iter().flat_map(|spec| spec.iter().copied()).collect())
}
