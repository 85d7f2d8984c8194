//! The cut of one dim: the uneven rules (2.4 and 2.9), for one dim at a time.

use std::str::FromStr;

use crate::{
    error::{Error, Result},
    radix::ceil_div,
};

/// A rule for a dim that does not divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Uneven {
    /// The dim must divide (JAX, TensorFlow DTensor).
    Even,
    /// Shard `i` is `[min(i·s, n), min((i+1)·s, n))` with `s = ceil(n / k)` (XLA).
    Ceil,
    /// [`Uneven::Ceil`] once per mesh axis of the spec, major to minor, each on what the previous left (PyTorch).
    Chunk,
    /// The first `n mod k` shards hold one element more (`numpy.array_split`).
    Balanced,
    /// Shard `i` is `[floor(n·i / k), floor(n·(i+1) / k))` (llama.cpp).
    Floor,
}

impl Uneven {
    /// The five rules.
    pub const ALL: [Self; 5] = [Self::Even, Self::Ceil, Self::Chunk, Self::Balanced, Self::Floor];

    /// The rule's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Ceil => "ceil",
            Self::Chunk => "chunk",
            Self::Balanced => "balanced",
            Self::Floor => "floor",
        }
    }
}

impl FromStr for Uneven {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|rule| rule.name() == name);
        found.ok_or_else(|| Error::UnknownRule { given: name.to_owned() })
    }
}

/// One dim of `n` elements cut into `k` shards.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cut {
    n: i64,
    k: i64,
    kind: CutKind,
}

/// A rule once `n` and `k` are known.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum CutKind {
    /// Every shard holds `step` elements, except those at the end: `"ceil"`, `"chunk"` over one axis, and whatever divides.
    Uniform { step: i64 },
    /// The first `extra` shards, of which there is at least one, hold `base + 1` elements, the others `base`.
    Balanced { base: i64, extra: i64 },
    /// `"floor"` where `n` is no multiple of `k`.
    Floor,
    /// `"chunk"` over several axes of these sizes, major first.
    Nested { axes: Vec<i64> },
}

impl Cut {
    /// The cut of dim `dim`, of `n` elements, over mesh axes of the sizes `axes`, major first.
    ///
    /// The product of the sizes must fit in 63 bits, as it does for the axes of one mesh.
    ///
    /// # Errors
    /// [`Error::Indivisible`] under [`Uneven::Even`] if `n` is not a multiple of the number of shards.
    pub fn new(dim: usize, n: i64, axes: &[i64], rule: Uneven) -> Result<Self> {
        let k = axes.iter().product();
        let kind = match rule {
            Uneven::Even if n % k != 0 => return Err(Error::Indivisible { dim, n, k }),
            Uneven::Chunk if axes.iter().filter(|&&size| size > 1).count() > 1 => {
                CutKind::Nested { axes: axes.iter().copied().filter(|&size| size > 1).collect() }
            }
            Uneven::Balanced if n % k != 0 => CutKind::Balanced { base: n / k, extra: n % k },
            Uneven::Floor if n % k != 0 => CutKind::Floor,
            Uneven::Even | Uneven::Ceil | Uneven::Chunk | Uneven::Balanced | Uneven::Floor => {
                CutKind::Uniform { step: ceil_div(n, k) }
            }
        };
        Ok(Self { n, k, kind })
    }

    /// The cut of `n` elements into `k` shards of `step`, of which the last may hold fewer, or none.
    pub(crate) fn in_steps(n: i64, k: i64, step: i64) -> Self {
        Self { n, k, kind: CutKind::Uniform { step } }
    }

    /// The cut of a dim of `n` elements into pieces of `chunk`, which is at least 1; the last holds what is left.
    #[must_use]
    pub fn in_chunks(n: i64, chunk: i64) -> Self {
        Self { n, k: ceil_div(n, chunk), kind: CutKind::Uniform { step: chunk } }
    }

    /// The number of elements.
    #[must_use]
    pub fn elements(&self) -> i64 {
        self.n
    }

    /// The number of shards.
    #[must_use]
    pub fn shards(&self) -> i64 {
        self.k
    }

    /// The length of the largest shard.
    #[must_use]
    pub fn largest(&self) -> i64 {
        ceil_div(self.n, self.k)
    }

    pub(crate) fn kind(&self) -> &CutKind {
        &self.kind
    }

    /// Start and stop of shard `index`, which must be in `0..shards()`; an empty one starts and stops at `n`.
    #[inline]
    #[must_use]
    pub fn bounds(&self, index: i64) -> (i64, i64) {
        let (start, stop) = match &self.kind {
            // Saturation is exact here: whatever is over 2^63 - 1 is over n as well.
            CutKind::Uniform { step } => {
                (index.saturating_mul(*step).min(self.n), (index + 1).saturating_mul(*step).min(self.n))
            }
            CutKind::Balanced { base, extra } => {
                let start = index * base + index.min(*extra);
                (start, start + base + i64::from(index < *extra))
            }
            CutKind::Floor => (floor_start(self.n, self.k, index), floor_start(self.n, self.k, index + 1)),
            CutKind::Nested { axes } => nested_bounds(self.n, axes, index),
        };
        if start < stop { (start, stop) } else { (self.n, self.n) }
    }

    /// The shard that holds the element at `position`, which must be in `0..elements()`.
    #[inline]
    #[must_use]
    pub fn owner(&self, position: i64) -> i64 {
        match &self.kind {
            CutKind::Uniform { step } => position / step,
            CutKind::Balanced { base, extra } => {
                // The part held by the larger shards is at most n, so the product fits.
                let large = extra * (base + 1);
                if position < large { position / (base + 1) } else { extra + (position - large) / base }
            }
            CutKind::Floor => floor_owner(self.n, self.k, position),
            CutKind::Nested { axes } => nested_owner(self.n, axes, position),
        }
    }
}

/// The cut of one dim: the questions that a plain dim and a packed one answer.
pub trait Dim {
    /// The number of elements.
    fn elements(&self) -> i64;

    /// The number of shards.
    fn shards(&self) -> i64;

    /// The length of the longest array.
    fn largest(&self) -> i64;

    /// The length of the array of shard `index` along the dim, padding included.
    fn extent(&self, index: i64) -> i64;

    /// The canonical shard of the element at `position`, which must be in `0..elements()`, and its place in that shard's
    /// array.
    fn locate(&self, position: i64) -> (i64, i64);

    /// The position of element `local` of the array of shard `index`; none if it is padding.
    fn position(&self, index: i64, local: i64) -> Option<i64>;
}

impl Dim for Cut {
    fn elements(&self) -> i64 {
        self.n
    }

    fn shards(&self) -> i64 {
        self.k
    }

    fn largest(&self) -> i64 {
        self.largest()
    }

    fn extent(&self, index: i64) -> i64 {
        let (start, stop) = self.bounds(index);
        stop - start
    }

    fn locate(&self, position: i64) -> (i64, i64) {
        let index = self.owner(position);
        (index, position - self.bounds(index).0)
    }

    fn position(&self, index: i64, local: i64) -> Option<i64> {
        Some(self.bounds(index).0 + local)
    }
}

/// `floor(n·index / k)` for an index up to `k`, so that it is at most `n`.
pub(crate) fn floor_start(n: i64, k: i64, index: i64) -> i64 {
    match n.checked_mul(index) {
        Some(product) => product / k,
        None => (i128::from(n) * i128::from(index) / i128::from(k)) as i64,
    }
}

/// The last shard that begins at or before `position`: the largest `i` with `floor(n·i / k) <= position`, that is with
/// `n·i < k·(position + 1)`. Those before it that begin there as well are empty.
pub(crate) fn floor_owner(n: i64, k: i64, position: i64) -> i64 {
    match k.checked_mul(position + 1) {
        Some(product) => (product - 1) / n,
        None => ((i128::from(k) * i128::from(position + 1) - 1) / i128::from(n)) as i64,
    }
}

/// Descends through `axes`: at each, the block is cut into pieces of `ceil(len / size)`.
fn nested_bounds(n: i64, axes: &[i64], index: i64) -> (i64, i64) {
    let (mut start, mut len) = (0, n);
    let mut weight: i64 = axes.iter().product();
    let mut rest = index;
    for size in axes {
        weight /= size;
        let step = ceil_div(len, *size);
        let skipped = (rest / weight).saturating_mul(step).min(len);
        rest %= weight;
        start += skipped;
        len = step.min(len - skipped);
    }
    (start, start + len)
}

/// The inverse of [`nested_bounds`].
fn nested_owner(n: i64, axes: &[i64], position: i64) -> i64 {
    let (mut owner, mut len, mut rest) = (0, n, position);
    for size in axes {
        let step = ceil_div(len, *size);
        let digit = rest / step;
        owner = owner * size + digit;
        rest -= digit * step;
        len = step.min(len - digit * step);
    }
    owner
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lengths(n: i64, axes: &[i64], rule: Uneven) -> Vec<i64> {
        let cut = Cut::new(0, n, axes, rule).unwrap();
        (0..cut.shards()).map(|i| cut.bounds(i)).map(|(start, stop)| stop - start).collect()
    }

    #[test]
    fn a_rule_is_read_by_its_name() {
        assert_eq!(Uneven::ALL.map(Uneven::name), ["even", "ceil", "chunk", "balanced", "floor"]);
        for rule in Uneven::ALL {
            assert_eq!(rule.name().parse(), Ok(rule));
        }
        assert_eq!("Even".parse::<Uneven>(), Err(Error::UnknownRule { given: "Even".to_owned() }));
    }

    #[test]
    fn the_documented_examples() {
        assert_eq!(lengths(9, &[2, 2], Uneven::Ceil), [3, 3, 3, 0]);
        assert_eq!(lengths(9, &[2, 2], Uneven::Chunk), [3, 2, 2, 2]);
        assert_eq!(lengths(9, &[2, 2], Uneven::Balanced), [3, 2, 2, 2]);
        assert_eq!(lengths(10, &[2, 2], Uneven::Ceil), [3, 3, 3, 1]);
        assert_eq!(lengths(10, &[2, 2], Uneven::Chunk), [3, 2, 3, 2]);
        assert_eq!(lengths(10, &[2, 2], Uneven::Balanced), [3, 3, 2, 2]);
        assert_eq!(lengths(10, &[2, 2], Uneven::Floor), [2, 3, 2, 3]);
        assert_eq!(lengths(2, &[5], Uneven::Floor), [0, 0, 1, 0, 1]);
        assert_eq!(Cut::new(3, 10, &[2, 2], Uneven::Even), Err(Error::Indivisible { dim: 3, n: 10, k: 4 }));
    }

    #[test]
    fn chunk_is_applied_axis_by_axis() {
        // 10 over (2, 3): 5 and 5, each then 2, 2, 1; over (3, 2): 4, 4, 2, then 2+2, 2+2, 1+1.
        assert_eq!(lengths(10, &[2, 3], Uneven::Chunk), [2, 2, 1, 2, 2, 1]);
        assert_eq!(lengths(10, &[3, 2], Uneven::Chunk), [2, 2, 2, 2, 1, 1]);
        // 2 over (2, 2): 1 and 1, and the second half of each is empty: it starts and stops at n.
        let cut = Cut::new(0, 2, &[2, 2], Uneven::Chunk).unwrap();
        assert_eq!((0..4).map(|i| cut.bounds(i)).collect::<Vec<_>>(), [(0, 1), (2, 2), (1, 2), (2, 2)]);
    }

    #[test]
    fn sizes_near_the_limit_do_not_wrap() {
        for rule in [Uneven::Ceil, Uneven::Chunk, Uneven::Balanced, Uneven::Floor] {
            let n = i64::MAX;
            let cut = Cut::new(0, n, &[1 << 20, 1 << 20], rule).unwrap();
            assert_eq!(cut.bounds(0).0, 0);
            assert_eq!(cut.bounds((1 << 40) - 1).1, n);
            assert_eq!(cut.owner(0), 0);
            let last = cut.owner(n - 1);
            assert_eq!(cut.bounds(last).1, n);
        }
        for (n, k) in [(i64::MAX, 1), (i64::MAX - 1, 2), (i64::MAX, i64::MAX), (i64::MAX - 1, i64::MAX)] {
            let cut = Cut::new(0, n, &[k], Uneven::Balanced).unwrap();
            assert_eq!(cut.owner(n - 1), n.min(k) - 1, "{n} in {k}");
            assert_eq!(cut.bounds(n.min(k) - 1), (n - n / n.min(k), n), "{n} in {k}");
        }
        let most = Cut::new(0, 3, &[i64::MAX], Uneven::Ceil).unwrap();
        assert_eq!((most.bounds(2), most.bounds(i64::MAX - 1)), ((2, 3), (3, 3)));
    }

    proptest! {
        #[test]
        fn shards_tile_the_dim_and_owners_are_found(
            n in prop_oneof![0..60_i64, 0..=i64::MAX],
            axes in prop::collection::vec(1..6_i64, 0..4),
            rule in prop::sample::select(&Uneven::ALL[1..]),
        ) {
            let cut = Cut::new(0, n, &axes, rule).unwrap();
            let mut boxes: Vec<_> = (0..cut.shards()).map(|i| (cut.bounds(i), i)).filter(|((a, b), _)| a < b).collect();
            boxes.sort_unstable();
            let mut end = 0;
            let largest = boxes.iter().map(|((start, stop), _)| stop - start).max().unwrap_or(0);
            prop_assert_eq!(largest, cut.largest());
            for ((start, stop), index) in boxes {
                prop_assert_eq!(start, end);
                prop_assert_eq!(cut.owner(start), index);
                prop_assert_eq!(cut.owner(stop - 1), index);
                end = stop;
            }
            prop_assert_eq!(end, n);
        }
    }
}
