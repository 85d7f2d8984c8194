//! Whether two strided arrays share a byte.
//!
//! They do if and only if `Σ xᵢ·aᵢ + p = gap + Σ yⱼ·bⱼ + q` has a solution in indices within the extents and byte offsets
//! within the items. The terms are sorted by stride and the large ones fixed first; what is left must then lie within the
//! reach of the smaller ones, which leaves one or two choices for each term unless the strides are very odd. The search is
//! exact up to [`BUDGET`] steps, and says "may share" beyond, which none but contrived strides reach (the general problem
//! is NP-hard; `numpy.shares_memory` has the same way out).

use crate::copy::{overlap::span, strided::Strided};

/// Steps of the search after which two arrays count as sharing memory.
const BUDGET: usize = 10_000;

/// Whether two arrays share a byte, or may for all that a bounded search can tell.
#[must_use]
pub fn share(a: &Strided, b: &Strided) -> bool {
    let (Some((low_a, high_a)), Some((low_b, high_b))) = (span(a), span(b)) else { return false };
    if high_a <= low_b || high_b <= low_a {
        return false;
    }
    // (stride, least factor, greatest factor); a's count upwards from its lowest address, b's are taken off.
    let mut terms: Vec<(i128, i128, i128)> = vec![(1, 1 - b.itemsize() as i128, a.itemsize() as i128 - 1)];
    for (region, sign) in [(a, 1), (b, -1)] {
        for &(extent, stride) in region.dims().iter().filter(|(extent, stride)| *extent > 1 && *stride != 0) {
            let (stride, reach) = ((stride as i128).abs(), sign * i128::from(extent - 1));
            match terms.iter_mut().find(|term| term.0 == stride) {
                Some(term) => (term.1, term.2) = (term.1 + reach.min(0), term.2 + reach.max(0)),
                None => terms.push((stride, reach.min(0), reach.max(0))),
            }
        }
    }
    terms.sort_unstable_by_key(|term| term.0);
    let mut steps = BUDGET;
    reachable(&terms, low_b - low_a, &mut steps)
}

/// Whether `target` is a sum of the terms, each times a factor within its limits. The terms are in order of their
/// strides, the first of which is 1.
fn reachable(terms: &[(i128, i128, i128)], target: i128, steps: &mut usize) -> bool {
    let Some((&(stride, least, greatest), smaller)) = terms.split_last() else { return target == 0 };
    if *steps == 0 {
        return true;
    }
    *steps -= 1;
    let low: i128 = smaller.iter().map(|term| term.0 * term.1).sum();
    let high: i128 = smaller.iter().map(|term| term.0 * term.2).sum();
    let first = least.max(-(high - target).div_euclid(stride));
    let last = greatest.min((target - low).div_euclid(stride));
    (first..=last).any(|factor| reachable(smaller, target - factor * stride, steps))
}
