//! One part of a packed dim of known size.

use crate::{
    error::{Error, Result},
    radix::{ceil_div, product},
    sections::spec::Pad,
    uneven::{Cut, Uneven},
};

/// A range of a dim that a holder has in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// The start of the range in the dim.
    pub start: i64,
    /// One past its end.
    pub stop: i64,
    /// The start of the range in the holder's array.
    pub local: i64,
}

impl Interval {
    /// Start, stop and local start.
    #[inline]
    pub(crate) fn numbers(&self) -> [i64; 3] {
        [self.start, self.stop, self.local]
    }
}

/// A part's shard index as one digit of the dim's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Digit {
    /// The weight of the digit in the dim's shard index.
    pub(crate) of_dim: i64,
    /// The number of its values.
    pub(crate) size: i64,
    /// The weight of the digit in the part's shard index.
    pub(crate) of_part: i64,
}

/// The factors of a part, those on either side of the cut one multiplied out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Part {
    /// The start of the part in the dim.
    base: i64,
    /// The product of the factors before the cut one.
    outer: i64,
    /// The product of those after it.
    inner: i64,
    /// The cut factor,
    factor: i64,
    /// so many of whose elements stay together,
    unit: i64,
    /// and how its units are cut.
    cut: Cut,
    /// For a padded factor the elements of it that every shard has room for.
    padded: Option<i64>,
    digits: Vec<Digit>,
}

impl Part {
    /// The part of `factors` whose factor `cut` is cut over axes of the sizes `axes`; `digits` reads their number off the
    /// dim's shard index.
    ///
    /// # Errors
    /// [`Error::PartIndivisible`], [`Error::Part`] for padding that does not divide, [`Error::Overflow`].
    #[allow(clippy::too_many_arguments, reason = "they are what a part is, and it is made in one place")]
    pub(crate) fn new(
        (dim, part): (usize, usize),
        base: i64,
        factors: &[i64],
        cut: Option<usize>,
        axes: &[i64],
        digits: Vec<Digit>,
        rule: Uneven,
        (unit, pad): (i64, Option<Pad>),
    ) -> Result<Self> {
        let what = format!("dim {dim}: part {part}");
        // An uncut part is one element of its whole size, in one shard.
        let (outer, n, inner) = match cut {
            Some(cut) => (&factors[..cut], factors[cut], &factors[cut + 1..]),
            None => (&[][..], 1, factors),
        };
        // Of a part without elements the other factors may be of any size.
        let empty = factors.contains(&0);
        let (outer, inner) = if empty { (0, 1) } else { (product(&what, outer)?, product(&what, inner)?) };
        let k: i64 = axes.iter().product();
        let indivisible = |_| Error::PartIndivisible { dim, part, n, unit, k };
        let (cut, padded) = match pad {
            Some(pad) => {
                let multiple = if pad.each { pad.multiple.checked_mul(k) } else { Some(pad.multiple) };
                let whole = multiple.and_then(|multiple| ceil_div(n, multiple).checked_mul(multiple));
                let whole = whole.ok_or_else(|| Error::Overflow { what: format!("{what}, padded") })?;
                if whole % k != 0 {
                    let why = format!("is {whole} when padded, which {k} shards do not divide evenly");
                    return Err(Error::Part { dim, part, why });
                }
                let step = whole / k;
                if step % unit != 0 {
                    let why = format!(
                        "is {whole} when padded, of which each of {k} shards has {step}: not a multiple of {unit}"
                    );
                    return Err(Error::Part { dim, part, why });
                }
                product(&format!("{what}, padded"), &[outer, whole, inner])?;
                (Cut::in_steps(ceil_div(n, unit), k, step / unit), Some(step))
            }
            None => (Cut::new(dim, ceil_div(n, unit), axes, rule).map_err(indivisible)?, None),
        };
        Ok(Self { base, outer, inner, factor: n, unit, cut, padded, digits: merged(digits) })
    }

    /// The start of the part in the dim.
    #[must_use]
    pub fn base(&self) -> i64 {
        self.base
    }

    /// The number of its elements.
    #[must_use]
    pub fn elements(&self) -> i64 {
        self.outer * self.factor * self.inner
    }

    /// Start and stop of shard `shard` of the part in the cut factor.
    #[inline]
    fn bounds(&self, shard: i64) -> (i64, i64) {
        let (lo, hi) = self.cut.bounds(shard);
        // The last unit may be short. Saturation is exact: what is over 2^63 - 1 is over the factor as well.
        let at = |units: i64| units.saturating_mul(self.unit).min(self.factor);
        (at(lo), at(hi))
    }

    /// The elements of the cut factor in a largest shard.
    fn largest(&self) -> i64 {
        let size = |shard| {
            let (lo, hi) = self.bounds(shard);
            hi - lo
        };
        let (units, shards) = (self.cut.elements(), self.cut.shards());
        let (lo, hi) = self.cut.bounds(0);
        if hi - lo == self.cut.largest() {
            size(0)
        } else if units % shards > 1 {
            // "floor": the last shard is not the only one with the most units, so that one has them all full.
            self.cut.largest() * self.unit
        } else {
            size(shards - 1)
        }
    }

    /// The shard of the part that the shard `index` of the dim holds.
    #[inline]
    #[must_use]
    pub fn shard(&self, index: i64) -> i64 {
        self.digits.iter().map(|digit| index / digit.of_dim % digit.size * digit.of_part).sum()
    }

    /// The first shard of the dim that holds the shard `shard` of the part.
    #[inline]
    #[must_use]
    pub fn canonical(&self, shard: i64) -> i64 {
        self.digits.iter().map(|digit| shard / digit.of_part % digit.size * digit.of_dim).sum()
    }

    /// The room that shard `index` of the dim has for the part in its array.
    #[inline]
    #[must_use]
    pub fn room(&self, index: i64) -> i64 {
        self.outer * self.row(index)
    }

    /// The elements that shard `index` of the dim holds of the part.
    #[must_use]
    pub fn held(&self, index: i64) -> i64 {
        let (lo, hi) = self.bounds(self.shard(index));
        self.outer * (hi - lo) * self.inner
    }

    /// The room for one of the `outer` rows.
    #[inline]
    fn row(&self, index: i64) -> i64 {
        let length = self.padded.unwrap_or_else(|| {
            let (lo, hi) = self.bounds(self.shard(index));
            hi - lo
        });
        length * self.inner
    }

    /// True if every shard of the dim has equal room.
    pub(crate) fn is_uniform(&self) -> bool {
        let full = self.factor % self.unit == 0;
        self.padded.is_some() || self.digits.is_empty() || (full && self.cut.elements() % self.cut.shards() == 0)
    }

    /// The largest room that a shard has.
    pub(crate) fn largest_room(&self) -> i64 {
        self.outer * self.padded.unwrap_or_else(|| self.largest()) * self.inner
    }

    /// True if shard `shard` of the part is a largest one.
    pub(crate) fn is_largest(&self, shard: i64) -> bool {
        let (lo, hi) = self.bounds(shard);
        self.padded.is_some() || hi - lo == self.largest()
    }

    /// The number of intervals that shard `index` of the dim holds of the part.
    #[must_use]
    pub fn intervals(&self, index: i64) -> i64 {
        let (lo, hi) = self.bounds(self.shard(index));
        if lo == hi || self.outer == 0 || self.inner == 0 {
            0
        } else if hi - lo == self.factor && self.padded.is_none_or(|step| step == hi - lo) {
            1
        } else {
            self.outer
        }
    }

    /// Shows `visit` the intervals of shard `index` of the dim, whose array has the part from `local` on.
    pub fn visit(&self, index: i64, local: i64, visit: &mut dyn FnMut(Interval)) {
        let (lo, hi) = self.bounds(self.shard(index));
        let rows = self.intervals(index);
        // In one interval if the shard is the whole part; lo is 0 then.
        let length = if rows == 1 { self.outer * (hi - lo) * self.inner } else { (hi - lo) * self.inner };
        let (whole, row) = (self.factor * self.inner, self.row(index));
        for o in 0..rows {
            let start = self.base + o * whole + lo * self.inner;
            visit(Interval { start, stop: start + length, local: local + o * row });
        }
    }

    /// The shard of the part that holds the element at `position` of the dim, which is in this part, and its place in what
    /// that shard has of the part.
    #[inline]
    #[must_use]
    pub fn locate(&self, position: i64) -> (i64, i64) {
        let within = position - self.base;
        let whole = self.factor * self.inner;
        let (o, rest) = (within / whole, within % whole);
        let (at, offset) = (rest / self.inner, rest % self.inner);
        let shard = self.cut.owner(at / self.unit);
        let (lo, hi) = self.bounds(shard);
        let length = self.padded.unwrap_or(hi - lo);
        (shard, (o * length + at - lo) * self.inner + offset)
    }

    /// The position in the dim of element `local` of the part in the array of shard `index`; none if that is padding.
    #[inline]
    #[must_use]
    pub fn position(&self, index: i64, local: i64) -> Option<i64> {
        let (lo, hi) = self.bounds(self.shard(index));
        let row = self.row(index);
        let (o, rest) = (local / row, local % row);
        let held = rest < (hi - lo) * self.inner;
        held.then(|| self.base + (o * self.factor + lo) * self.inner + rest)
    }

    /// The number of shards.
    pub(crate) fn shards(&self) -> i64 {
        self.cut.shards()
    }
}

/// The digits with neighbours put together where they are neighbours in both numbers.
fn merged(digits: Vec<Digit>) -> Vec<Digit> {
    let mut all: Vec<Digit> = Vec::with_capacity(digits.len());
    for digit in digits.into_iter().filter(|digit| digit.size > 1) {
        match all.last_mut() {
            // Major first: the minor one's value times its size is the major one's.
            Some(major) if major.of_dim == digit.of_dim * digit.size && major.of_part == digit.of_part * digit.size => {
                *major = Digit { of_dim: digit.of_dim, size: major.size * digit.size, of_part: digit.of_part };
            }
            _ => all.push(digit),
        }
    }
    all
}
