//! The code that the two kernels share.
//!
//! Nearly every tensor is *narrow*, with at most 2^31 elements, and has at most four dims, cut uniformly. Then all numbers
//! fit in 32 bits, their products in 64, and a loop over dims whose number is known is compiled to instructions that do
//! four elements at once (AVX2). Whether the processor has them is found out when the program runs; if not, the same
//! loop is there for any processor.

use multiversion::multiversion;

use crate::{partition::Partition, radix::NarrowDivider};

/// One to four dims, for which the kernel is compiled each time.
pub(super) enum Unrolled<T> {
    One([T; 1]),
    Two([T; 2]),
    Three([T; 3]),
    Four([T; 4]),
}

impl<T: Copy> Unrolled<T> {
    /// The dims; none if there are too many or too few, or one of them is none.
    pub(super) fn new(dims: impl Iterator<Item = Option<T>>) -> Option<Self> {
        match *dims.collect::<Option<Vec<_>>>()?.as_slice() {
            [a] => Some(Self::One([a])),
            [a, b] => Some(Self::Two([a, b])),
            [a, b, c] => Some(Self::Three([a, b, c])),
            [a, b, c, d] => Some(Self::Four([a, b, c, d])),
            _ => None,
        }
    }
}

/// An element on its way through the dims, the last first.
pub(super) trait Element<T> {
    /// Takes one dim from what is left; it is all that is left if `major`, for the first dim.
    fn take(&mut self, dim: &T, major: bool);
}

/// Takes each dim. Not in a loop, which the compiler unrolls only if it is short, and only then makes vectors of it.
#[inline(always)]
pub(super) fn take_all<T, const R: usize>(element: &mut impl Element<T>, dims: &[T; R]) {
    const { assert!(matches!(R, 1..=4)) };
    if R > 3 {
        element.take(&dims[3], false);
    }
    if R > 2 {
        element.take(&dims[2], false);
    }
    if R > 1 {
        element.take(&dims[1], false);
    }
    element.take(&dims[0], true);
}

/// True if every offset and shard id fits in 31 bits, and every size in 32.
pub(super) fn is_narrow(partition: &Partition) -> bool {
    // Where one dim has no elements the others may be of any size.
    let sizes = partition.shape().iter().copied().chain([partition.size(), partition.layout().total_shards()]);
    sizes.max() <= Some(NarrowDivider::LIMIT)
}

/// The last shard that is not empty, and its length, of `n` elements cut into shards of `step`.
pub(super) fn last_and_tail(n: i64, step: i64) -> (i64, i64) {
    let last = if n == 0 { 0 } else { (n - 1) / step };
    (last, n - last * step)
}

/// True if one of `values` is not in `0..limit`.
#[multiversion(targets("x86_64+avx2+bmi2"))]
pub(super) fn any_outside(values: &[i64], limit: i64) -> bool {
    let last = limit - 1;
    // Each of the two is negative if the value is outside, and `|` keeps the sign.
    values.iter().fold(0, |signs, &value| signs | value | last.wrapping_sub(value)) < 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_outside_is_enough_and_a_second_does_not_hide_it() {
        for limit in [0, 1, 5, i64::MAX] {
            let values = [i64::MIN, -1, 0, 1, limit - 1, limit, i64::MAX];
            for pair in values.iter().flat_map(|&a| values.map(|b| [a, b])) {
                let outside = pair.iter().any(|value| !(0..limit).contains(value));
                assert_eq!(any_outside(&pair, limit), outside, "{pair:?} below {limit}");
            }
        }
    }
}
