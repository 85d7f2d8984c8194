//! Mixed-radix numbers: checked products, row-major strides, and division by a divisor that is used many times.

use crate::{
    error::{Error, Result},
    short,
};

/// The product of `sizes`, which are not negative; `what` names it in the error.
///
/// A zero makes the product zero, however large the others are and wherever the zero stands.
///
/// # Errors
/// [`Error::Overflow`] if the product is over 2^63 - 1.
///
/// ```
/// use shardwise_core::radix::product;
/// assert_eq!(product("size", &[3, 4])?, 12);
/// assert_eq!(product("size", &[i64::MAX, 2, 0])?, 0);
/// assert!(product("size", &[i64::MAX, 2]).is_err());
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn product(what: &str, sizes: &[i64]) -> Result<i64> {
    if sizes.contains(&0) {
        return Ok(0);
    }
    sizes
        .iter()
        .try_fold(1_i64, |acc, &size| acc.checked_mul(size))
        .ok_or_else(|| Error::Overflow { what: format!("{what}: the product of {sizes:?}") })
}

/// The row-major strides of `sizes`, in elements: `[bcd, cd, d, 1]` for `[a, b, c, d]`.
///
/// The product of the sizes must have been checked; where it is zero the strides saturate, and nothing can use them.
#[must_use]
pub fn strides(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; sizes.len()];
    for i in (1..sizes.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(sizes[i]);
    }
    strides
}

/// The digits of `index` in the row-major number system of `sizes`, whose product is over `index`.
#[must_use]
pub fn unravel(mut index: i64, sizes: &[i64]) -> Vec<i64> {
    let mut digits = vec![0; sizes.len()];
    for (digit, &size) in digits.iter_mut().zip(sizes).rev() {
        *digit = index % size;
        index /= size;
    }
    digits
}

/// True if two elements of `itemsize` bytes in dims of these extents and strides, in bytes, may
/// share a byte: whether a stride is within the reach of the smaller ones.
pub fn overlaps_itself(itemsize: i64, dims: impl Iterator<Item = (i64, i64)>) -> bool {
    let mut dims: Vec<(i128, i128)> = dims
        .filter(|(extent, _)| *extent > 1)
        .map(|(extent, stride)| (i128::from(stride).abs(), i128::from(extent)))
        .collect();
    short::sort_by_key(&mut dims, |&dim| dim);
    let mut reach = i128::from(itemsize);
    dims.into_iter().any(|(stride, extent)| {
        let within = stride < reach;
        reach += stride * (extent - 1);
        within
    })
}

/// The greatest common divisor.
#[must_use]
pub fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// `n / k` rounded up, for `n >= 0` and `k >= 1`, without the overflow of `(n + k - 1) / k`.
#[must_use]
pub fn ceil_div(n: i64, k: i64) -> i64 {
    n / k + i64::from(n % k != 0)
}

/// A fixed divisor `d >= 1` of numbers below 2^63, as one multiplication and one shift.
///
/// With `L = ceil(log2 d)` and `m = ceil(2^(63+L) / d)`, which fits in 64 bits because `2^L < 2d`, the error
/// `e = m·d - 2^(63+L)` is below `d <= 2^L`. So for `x < 2^63` the excess `e·x / (d·2^(63+L))` is below `1/d`, too
/// little to carry `x·m / 2^(63+L)` over the next whole number, and its floor is `x / d` (Granlund and Montgomery,
/// "Division by invariant integers using multiplication", 1994, theorem 4.2). `x` is doubled first, so that the high
/// word of the product is already shifted by 63.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Divider {
    divisor: u64,
    multiplier: u64,
    shift: u32,
}

impl Divider {
    /// A divider by `divisor`, which must be at least 1; 0 is taken as 1, for dims that have no elements to divide.
    #[must_use]
    pub fn new(divisor: i64) -> Self {
        let divisor = divisor.max(1).unsigned_abs();
        let shift = u64::BITS - (divisor - 1).leading_zeros();
        let multiplier = (1_u128 << (63 + shift)).div_ceil(u128::from(divisor));
        Self { divisor, multiplier: u64::try_from(multiplier).unwrap_or(u64::MAX), shift }
    }

    /// `(x / divisor, x % divisor)`, for `0 <= x`.
    #[inline(always)]
    #[must_use]
    pub fn div_rem(self, x: i64) -> (i64, i64) {
        let x = x as u64;
        let high = ((u128::from(x << 1) * u128::from(self.multiplier)) >> 64) as u64;
        let quotient = high >> self.shift;
        (quotient as i64, x.wrapping_sub(quotient.wrapping_mul(self.divisor)) as i64)
    }
}

/// A [`Divider`] of numbers below 2^31, by a divisor up to 2^31, with products of 64 bits: the processor has vector
/// instructions for these. The proof is the same with 31 in the place of 63: `m = ceil(2^(31+L) / d)` fits in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NarrowDivider {
    divisor: u32,
    multiplier: u32,
    shift: u32,
}

impl NarrowDivider {
    /// The numbers that are divided are below this, and the divisors at most this.
    pub const LIMIT: i64 = 1 << 31;

    /// A divider by `divisor`, which must be from 1 to [`NarrowDivider::LIMIT`]; 0 is taken as 1.
    #[must_use]
    pub fn new(divisor: i64) -> Self {
        let divisor = divisor.max(1).unsigned_abs();
        let shift = 31 + u64::BITS - (divisor - 1).leading_zeros();
        let multiplier = (1_u64 << shift).div_ceil(divisor);
        Self { divisor: divisor as u32, multiplier: multiplier as u32, shift }
    }
}

/// The interface of dividers for the kernels; the narrow and the wide one differ in the width of
/// the numbers.
pub trait Divide: Copy {
    /// `(x / divisor, x % divisor)`.
    fn div_rem(self, x: i64) -> (i64, i64);

    /// `a * b`, which is in the range of the dividend.
    fn times(a: i64, b: i64) -> i64;
}

impl Divide for Divider {
    #[inline(always)]
    fn div_rem(self, x: i64) -> (i64, i64) {
        self.div_rem(x)
    }

    #[inline(always)]
    fn times(a: i64, b: i64) -> i64 {
        a.wrapping_mul(b)
    }
}

/// The low 32 bits, in a form of which the compiler sees that the others are zero. Products of two of them fit in 64 bits;
/// below they are `wrapping`, because where the compiler puts a check it does not make vectors of the loop.
#[inline(always)]
fn low(x: i64) -> u64 {
    u64::from(x as u32)
}

impl Divide for NarrowDivider {
    #[inline(always)]
    fn div_rem(self, x: i64) -> (i64, i64) {
        let quotient = low(x).wrapping_mul(u64::from(self.multiplier)) >> (self.shift & 63);
        let whole = low(quotient as i64).wrapping_mul(u64::from(self.divisor));
        (quotient as i64, low(x.wrapping_sub(whole as i64)) as i64)
    }

    #[inline(always)]
    fn times(a: i64, b: i64) -> i64 {
        low(a).wrapping_mul(low(b)) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn divider_is_exact_at_its_edges() {
        let mut edges = vec![1, 2, 3, 5, 7, 10, i64::MAX, i64::MAX - 1, i64::MAX / 2, i64::MAX / 2 + 1];
        edges.extend((1..62).flat_map(|bit| [(1_i64 << bit) - 1, 1 << bit, (1 << bit) + 1]));
        for &d in &edges {
            let divider = Divider::new(d);
            for &n in &edges {
                for x in [
                    0,
                    n,
                    n - 1,
                    (i64::MAX / n) * n,
                    (i64::MAX / n) * n - 1,
                    (i64::MAX / d) * d,
                    (i64::MAX / d) * d - 1,
                ] {
                    assert_eq!(divider.div_rem(x), (x / d, x % d), "{x} / {d}");
                }
            }
        }
    }

    #[test]
    fn narrow_divider_is_exact_at_its_edges() {
        let mut edges = vec![1, 2, 3, 5, 7, 10, NarrowDivider::LIMIT, NarrowDivider::LIMIT / 2 + 1];
        edges.extend((1..31).flat_map(|bit| [(1_i64 << bit) - 1, 1 << bit, (1 << bit) + 1]));
        edges.retain(|&d| d >= 1);
        for &d in &edges {
            let divider = NarrowDivider::new(d);
            let largest = NarrowDivider::LIMIT - 1;
            let multiples = edges.iter().flat_map(|&n| [n, n - 1, (largest / n) * n, (largest / n) * n - 1]);
            for x in multiples
                .chain([0, (largest / d) * d, (largest / d) * d - 1, largest])
                .filter(|x| (0..=largest).contains(x))
            {
                assert_eq!(divider.div_rem(x), (x / d, x % d), "{x} / {d}");
            }
        }
    }

    proptest! {
        #[test]
        fn divider_is_exact(d in 1..=i64::MAX, x in 0..=i64::MAX, small in 1..=5000_i64) {
            prop_assert_eq!(Divider::new(d).div_rem(x), (x / d, x % d));
            prop_assert_eq!(Divider::new(small).div_rem(x), (x / small, x % small));
        }

        #[test]
        fn narrow_divider_is_exact(d in 1..=NarrowDivider::LIMIT, x in 0..NarrowDivider::LIMIT, small in 1..=5000_i64) {
            prop_assert_eq!(NarrowDivider::new(d).div_rem(x), (x / d, x % d));
            prop_assert_eq!(NarrowDivider::new(small).div_rem(x), (x / small, x % small));
        }

        #[test]
        fn product_is_exact_or_an_error(sizes in prop::collection::vec(0..=i64::MAX, 0..5)) {
            let wide = sizes.iter().try_fold(1_u128, |acc, &s| acc.checked_mul(s as u128));
            let exact = if sizes.contains(&0) { Some(0) } else { wide.and_then(|w| i64::try_from(w).ok()) };
            prop_assert_eq!(product("size", &sizes).ok(), exact);
        }

        #[test]
        fn unravel_is_the_inverse_of_the_strides(sizes in prop::collection::vec(1..9_i64, 1..5), seed in 0..i64::MAX) {
            let index = seed % sizes.iter().product::<i64>();
            let digits = unravel(index, &sizes);
            let back: i64 = digits.iter().zip(strides(&sizes)).map(|(d, s)| d * s).sum();
            prop_assert_eq!(back, index);
            prop_assert!(digits.iter().zip(&sizes).all(|(d, s)| d < s));
        }
    }
}
