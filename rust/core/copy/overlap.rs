//! Whether strided arrays share a byte.
//!
//! Two of them share a byte if and only if `Σ xᵢ·aᵢ + p = gap + Σ yⱼ·bⱼ + q` has a solution in indices within the
//! extents and byte offsets within the items. The terms are sorted by stride and the large ones fixed first; what is left
//! must then lie within the reach of the smaller ones, which leaves one or two choices for each term unless the strides
//! are very odd. The search is exact up to [`BUDGET`] steps, and says "may share" beyond, which none but contrived
//! strides reach (the general problem is NP-hard; `numpy.shares_memory` has the same way out).

use crate::{
    copy::strided::Strided,
    error::{Error, Result},
};

/// Steps of the search after which two arrays count as sharing memory.
const BUDGET: usize = 10_000;

/// The arrays of a copy, checked: no byte of a destination is a byte of anything else.
#[derive(Debug, Clone, Copy)]
pub struct Disjoint<'a> {
    sources: &'a [Strided],
    destinations: &'a [Strided],
}

impl<'a> Disjoint<'a> {
    /// Checks that no destination overlaps itself, another destination or a source. Sources may overlap one another.
    ///
    /// The cost grows with the pairs whose byte ranges interleave: none for arrays of their own.
    ///
    /// # Errors
    /// [`Error::OverlapsItself`], [`Error::OverlapsOther`].
    pub fn new(sources: &'a [Strided], destinations: &'a [Strided]) -> Result<Self> {
        if let Some(index) = destinations.iter().position(overlaps_itself) {
            return Err(Error::OverlapsItself { index });
        }
        let of = |regions: &'a [Strided], written: bool| {
            let spans = regions.iter().enumerate().map(move |(i, region)| (span(region), written, i, region));
            spans.filter_map(|(span, written, i, region)| span.map(|(low, high)| (low, high, written, i, region)))
        };
        let mut all: Vec<_> = of(sources, false).chain(of(destinations, true)).collect();
        all.sort_unstable_by_key(|&(low, _, written, i, _)| (low, written, i));
        let mut active: [Vec<(i128, usize, &Strided)>; 2] = [Vec::new(), Vec::new()];
        for (low, high, written, index, region) in all {
            for (kind, regions) in active.iter_mut().enumerate() {
                regions.retain(|&(end, ..)| end > low);
                if !written && kind == 0 {
                    continue;
                }
                if let Some(&(_, position, _)) = regions.iter().find(|(_, _, other)| share(region, other)) {
                    let (index, other, position) = match (written, kind == 1) {
                        (true, true) => (index.max(position), "out", index.min(position)),
                        (true, false) => (index, "src_shards", position),
                        (false, _) => (position, "src_shards", index),
                    };
                    return Err(Error::OverlapsOther { index, other, position });
                }
            }
            active[usize::from(written)].push((high, index, region));
        }
        Ok(Self { sources, destinations })
    }

    /// The sources.
    #[must_use]
    pub fn sources(&self) -> &'a [Strided] {
        self.sources
    }

    /// The destinations.
    #[must_use]
    pub fn destinations(&self) -> &'a [Strided] {
        self.destinations
    }
}

/// The lowest address and one past the highest; none if the region is empty.
fn span(region: &Strided) -> Option<(i128, i128)> {
    let (mut low, mut high) = (region.address() as i128, region.address() as i128 + region.itemsize() as i128);
    for &(extent, stride) in region.dims() {
        let reach = i128::from(extent - 1) * stride as i128;
        low += reach.min(0);
        high += reach.max(0);
    }
    (region.dims().iter().all(|&(extent, _)| extent > 0) && region.itemsize() > 0).then_some((low, high))
}

/// Whether two elements of an array may share a byte: whether a stride is within the reach of the smaller ones.
fn overlaps_itself(region: &Strided) -> bool {
    if span(region).is_none() {
        return false;
    }
    let mut dims: Vec<(i128, i128)> = (region.dims().iter().filter(|(extent, _)| *extent > 1))
        .map(|&(extent, stride)| ((stride as i128).abs(), i128::from(extent)))
        .collect();
    dims.sort_unstable();
    let mut reach = region.itemsize() as i128;
    dims.into_iter().any(|(stride, extent)| {
        let within = stride < reach;
        reach += stride * (extent - 1);
        within
    })
}

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

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn region(address: usize, itemsize: usize, dims: &[(i64, isize)]) -> Strided {
        // SAFETY: the region is never read or written, only its addresses are compared.
        unsafe { Strided::new(std::ptr::without_provenance_mut(address), itemsize, dims.to_vec()) }
    }

    fn bytes(region: &Strided) -> Vec<i128> {
        let mut all = vec![region.address() as i128];
        for &(extent, stride) in region.dims() {
            all = all.iter().flat_map(|at| (0..extent).map(move |i| at + i128::from(i) * stride as i128)).collect();
        }
        all.iter().flat_map(|at| (0..region.itemsize() as i128).map(move |i| at + i)).collect()
    }

    proptest! {
        #[test]
        fn sharing_is_what_comparing_all_bytes_says(
            dims in prop::collection::vec(prop::collection::vec((0..4_i64, -20..20_isize), 0..4), 2),
            sizes in prop::collection::vec(0..5_usize, 2),
        ) {
            for gap in 0..60 {
                let (a, b) = (region(1000, sizes[0], &dims[0]), region(1000 + gap, sizes[1], &dims[1]));
                let all_a: HashSet<_> = bytes(&a).into_iter().collect();
                prop_assert_eq!(share(&a, &b), bytes(&b).iter().any(|byte| all_a.contains(byte)));
                prop_assert_eq!(share(&b, &a), share(&a, &b));
                // Itself: never missed; refused needlessly only for strides that interleave.
                if all_a.len() != bytes(&a).len() {
                    prop_assert!(overlaps_itself(&a));
                }
            }
        }
    }

    #[test]
    fn a_region_overlaps_itself_where_a_stride_is_within_the_smaller_ones() {
        // Lines of three items of 8 bytes, 24 in all, and a dim of one position, which has no steps.
        for stride in (-60..60).filter(|&stride| stride != 0) {
            let lines = region(1000, 8, &[(2, stride), (1, 0), (3, -8)]);
            let distinct: HashSet<_> = bytes(&lines).into_iter().collect();
            assert_eq!(overlaps_itself(&lines), distinct.len() < 48, "{stride}");
        }
        // Nested in C order, however deep.
        assert!(!overlaps_itself(&region(1000, 2, &[(4, 60), (5, 12), (2, 6), (3, 2)])));
    }

    #[test]
    fn items_the_same_distance_apart_interleave_or_share() {
        for (stride, size, other) in (1..9).flat_map(|stride| [(stride, 1, 2), (stride, 3, 1), (stride, 4, 4)]) {
            for gap in 0..40 {
                let (a, b) = (region(1000, size, &[(3, stride)]), region(1000 + gap, other, &[(2, -stride)]));
                let all = bytes(&a);
                assert_eq!(share(&a, &b), bytes(&b).iter().any(|byte| all.contains(byte)), "{stride} {gap}");
            }
        }
    }

    #[test]
    fn column_views_of_one_array_are_apart() {
        let columns: Vec<Strided> = (0..4).map(|i| region(1000 + 8 * i, 8, &[(5, 32), (1, 8)])).collect();
        assert!(Disjoint::new(&[], &columns).is_ok());
        assert!(Disjoint::new(&columns[..2], &columns[2..]).is_ok());
        let error = Disjoint::new(&columns[..2], &columns[1..]).unwrap_err();
        assert_eq!(error, Error::OverlapsOther { index: 0, other: "src_shards", position: 1 });
        let zero_stride = [region(1000, 8, &[(5, 0)])];
        assert_eq!(Disjoint::new(&[], &zero_stride).unwrap_err(), Error::OverlapsItself { index: 0 });
        assert!(Disjoint::new(&zero_stride, &[]).is_ok());
    }
}
