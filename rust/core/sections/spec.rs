//! The spec of a packed dim in a layout, before its shape is known.

use crate::{
    error::{Error, Result},
    radix::product,
    sections::{MOST_FACTORS, MOST_PARTS},
    uneven::Uneven,
};

/// The size of a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Factor {
    /// A known one.
    Known(i64),
    /// A multiple of the size that makes the parts add up to the dim, which is one size for all parts of the dim.
    Free(i64),
}

/// The padding of a part's cut factor before it is cut: what is beyond it has room in the holders' arrays only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pad {
    /// The padded factor is a multiple of this,
    pub multiple: i64,
    /// or, if so, every shard of it is.
    pub each: bool,
}

/// One part of a packed dim: its factors, major first, and how one of them is cut by `axes`, major first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PartSpec<S> {
    /// The factors.
    pub factors: Vec<Factor>,
    /// The position of the factor that is cut; none if every device holds the whole part.
    pub cut: Option<usize>,
    /// The axes and sub-axes that cut it.
    pub axes: Vec<S>,
    /// The rule where it does not divide; none is the partition's.
    pub uneven: Option<Uneven>,
    /// The most shards: of more devices, those that differ in the minor axes only hold the same shard.
    pub at_most: Option<i64>,
    /// True if elements of the factor are cut where there are more shards than elements, and as
    /// many as a multiple of them.
    pub split: bool,
    /// The number of elements of the cut factor that stay together; none is 1. The last unit may be
    /// short.
    pub unit: Option<i64>,
    /// Padding.
    pub pad: Option<Pad>,
}

/// The spec of one dim in a layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DimSpec<S> {
    /// The axes that cut it, major first.
    Axes(Vec<S>),
    /// The parts of the dim, one after the other.
    Parts(Vec<PartSpec<S>>),
}

impl<S> DimSpec<S> {
    /// Check that the parts of dim `dim` can be cut so.
    ///
    /// # Errors
    /// [`Error::Parts`] for no parts or too many, [`Error::Part`] for one that cannot be.
    pub(crate) fn check(&self, dim: usize) -> Result<()> {
        let Self::Parts(parts) = self else { return Ok(()) };
        if parts.is_empty() || parts.len() > MOST_PARTS {
            return Err(Error::Parts { dim, given: parts.len(), limit: MOST_PARTS });
        }
        for (part, spec) in parts.iter().enumerate() {
            spec.check().map_err(|why| Error::Part { dim, part, why })?;
        }
        Ok(())
    }
}

impl<S> PartSpec<S> {
    fn check(&self) -> std::result::Result<(), String> {
        let count = self.factors.len();
        if count == 0 || count > MOST_FACTORS {
            return Err(format!("has {count} factors; a part has 1 to {MOST_FACTORS}"));
        }
        let mut free = false;
        for (position, factor) in self.factors.iter().enumerate() {
            match *factor {
                Factor::Known(size) if size < 0 => {
                    return Err(format!("factor {position} is {size}; a factor must be at least 0"));
                }
                Factor::Free(ratio) if ratio < 1 => {
                    return Err(format!("its ratio is {ratio}; it must be at least 1"));
                }
                Factor::Free(_) if free => {
                    return Err(format!("factor {position} is a second factor of unknown size"));
                }
                Factor::Free(_) => free = true,
                Factor::Known(_) => {}
            }
        }
        match self.cut {
            Some(cut) if cut >= count => {
                return Err(format!("cuts factor {cut}, but it has the factors 0 to {}", count - 1));
            }
            None if !self.axes.is_empty() => return Err("has axes but cuts no factor".to_owned()),
            None if self.pad.is_some()
                || self.at_most.is_some()
                || self.uneven.is_some()
                || self.unit.is_some()
                || self.split =>
            {
                return Err("says how to cut but cuts no factor".to_owned());
            }
            _ => {}
        }
        if let Some(most) = self.at_most.filter(|&most| most < 1) {
            return Err(format!("is to be cut into at most {most}; that must be at least 1"));
        }
        if let Some(unit) = self.unit.filter(|&unit| unit < 1) {
            return Err(format!("has a unit of {unit}; that must be at least 1"));
        }
        if self.split && self.unit.is_some() {
            return Err("has a unit, which must stay whole, but is to be split".to_owned());
        }
        if self.split && self.pad.is_some() {
            return Err("is padded in whole units, which cannot be split".to_owned());
        }
        if let Some(pad) = self.pad.filter(|pad| pad.multiple < 1) {
            return Err(format!("is padded to a multiple of {}; that must be at least 1", pad.multiple));
        }
        Ok(())
    }
}

/// The sizes of the parts of dim `dim`, of `n` elements: each part's factors, all known.
///
/// # Errors
/// [`Error::PartsSum`] if they do not add up to `n`, [`Error::FreeFactor`] if no size of the unknown factor makes them,
/// [`Error::Overflow`].
pub(crate) fn resolved<'a>(
    dim: usize,
    n: i64,
    parts: impl Iterator<Item = &'a [Factor]> + Clone,
) -> Result<Vec<Vec<i64>>> {
    let what = || format!("dim {dim}: the sum of its parts");
    let overflow = || Error::Overflow { what: what() };
    // The elements of known parts, and what the others have for each unit of the unknown factor.
    let (mut known, mut per_unit, mut any_free) = (0_i64, 0_i64, false);
    for factors in parts.clone() {
        let free = factors.iter().any(|factor| matches!(factor, Factor::Free(_)));
        let sizes: Vec<i64> = factors
            .iter()
            .map(|f| match *f {
                Factor::Known(size) | Factor::Free(size) => size,
            })
            .collect();
        let size = product(&format!("dim {dim}: a part"), &sizes)?;
        let sum = if free { &mut per_unit } else { &mut known };
        *sum = sum.checked_add(size).ok_or_else(overflow)?;
        any_free |= free;
    }
    let unit = if any_free {
        let rest = n - known; // Both are at least 0.
        if per_unit == 0 {
            return Err(Error::PartsSum { dim, n, sum: known });
        }
        if rest < 0 || rest % per_unit != 0 {
            return Err(Error::FreeFactor { dim, n, known, per_unit });
        }
        rest / per_unit
    } else if known != n {
        return Err(Error::PartsSum { dim, n, sum: known });
    } else {
        0
    };
    parts
        .map(|factors| {
            (factors.iter())
                .map(|factor| match *factor {
                    Factor::Known(size) => Ok(size),
                    Factor::Free(ratio) => unit.checked_mul(ratio).ok_or_else(overflow),
                })
                .collect()
        })
        .collect()
}
