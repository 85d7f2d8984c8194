//! Rules: factors, their kinds, and which stand in which dims.

use std::{borrow::Cow, ops::Range};

use crate::{
    error::{Error, Result},
    shown,
};

/// The effect on an op when a factor is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Each device computes its part of the result.
    Pass,
    /// Each device computes an addend of the result.
    Sum,
    /// The op needs the whole factor on each device.
    Whole,
    /// Each device computes its part of the result, with a few elements that its neighbours have.
    Shift,
}

impl Kind {
    /// All, with their names.
    pub const ALL: [(Self, &'static str); 4] =
        [(Self::Pass, "pass"), (Self::Sum, "sum"), (Self::Whole, "whole"), (Self::Shift, "shift")];

    /// The name, as texts have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The way in which the addends of a [`Kind::Sum`] are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// By adding them.
    Add,
    /// The largest.
    Maximum,
    /// The smallest.
    Minimum,
    /// By multiplying them.
    Multiply,
    /// By the logical and, of bits or of truth values.
    And,
    /// By the logical or.
    Or,
    /// By the exclusive or.
    Xor,
}

impl Reduction {
    /// All, with the names of the ops that do it.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Add, "add"),
        (Self::Maximum, "maximum"),
        (Self::Minimum, "minimum"),
        (Self::Multiply, "multiply"),
        (Self::And, "and"),
        (Self::Or, "or"),
        (Self::Xor, "xor"),
    ];

    /// The name, as texts have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(_, known)| *known == name).map(|(reduction, _)| reduction)
    }
}

/// The size of a factor that only a shape will tell.
pub const UNKNOWN: i64 = -1;

/// The name of a factor by its number: `i` to `z`, then `z_1` and so on.
#[must_use]
pub fn factor_name(number: usize) -> String {
    match u8::try_from(number) {
        Ok(number) if number < 18 => char::from(b'i' + number).to_string(),
        _ => format!("z_{}", number - 17),
    }
}

/// A factor of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Factor {
    /// The size of the factor, or [`UNKNOWN`].
    pub size: i64,
    /// The effect on the op when it is cut.
    pub kind: Kind,
    /// True if its cut stays where it is: it is not taken over by the other tensors.
    pub blocked: bool,
}

/// A rule of how an op computes with tensors that are cut.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    pub(super) factors: Vec<Factor>,
    /// The way in which addends are put together.
    reduction: Reduction,
    /// The number of tensors that are operands.
    operands: usize,
    /// The ends of the dims of each tensor among those of all.
    tensors: Vec<u32>,
    /// For each dim of all tensors the end of its factors in this list, then the factors of all dims.
    places: Vec<u32>,
    /// The names of the factors, if a text gave them.
    pub(super) names: Option<Vec<String>>,
}

impl Rule {
    /// The factors.
    #[must_use]
    pub fn factors(&self) -> &[Factor] {
        &self.factors
    }

    /// The name of a factor: the one that a text gave it, or one by its number.
    #[must_use]
    pub fn name(&self, factor: usize) -> Cow<'_, str> {
        let given = self.names.as_ref().and_then(|names| names.get(factor));
        given.map_or_else(|| factor_name(factor).into(), Cow::from)
    }

    /// True if a text gave it.
    #[must_use]
    pub fn is_named(&self) -> bool {
        self.names.is_some()
    }

    /// The way in which the addends of a [`Kind::Sum`] are put together.
    #[must_use]
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// The number of operands, which are the first tensors.
    #[must_use]
    pub fn operands(&self) -> usize {
        self.operands
    }

    /// The number of operands and results together.
    #[must_use]
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The number of dims of a tensor.
    #[inline]
    #[must_use]
    pub fn rank(&self, tensor: usize) -> usize {
        dims_of(&self.tensors, tensor).len()
    }

    /// The factors of a dim of a tensor, major first.
    #[inline]
    #[must_use]
    pub fn dim(&self, tensor: usize, dim: usize) -> &[u32] {
        let dim = dims_of(&self.tensors, tensor).start + dim;
        let first = if dim == 0 { self.all_dims() } else { self.places[dim - 1] as usize };
        &self.places[first..self.places[dim] as usize]
    }

    /// The number of dims of all tensors.
    #[inline]
    fn all_dims(&self) -> usize {
        self.tensors.last().map_or(0, |end| *end as usize)
    }

    /// The factors of each dim of a tensor.
    #[inline]
    pub(crate) fn dims(&self, tensor: usize) -> impl Iterator<Item = &[u32]> {
        (0..self.rank(tensor)).map(move |dim| self.dim(tensor, dim))
    }

    /// True if a dim of a tensor has a factor.
    pub(crate) fn has(&self, tensor: usize, factor: usize) -> bool {
        self.dims(tensor).flatten().any(|other| *other as usize == factor)
    }

    /// True if each dim is one factor.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.places.len() == 2 * self.all_dims()
    }

    /// `"operands[0]"`, or `"results[0]"`.
    #[must_use]
    pub fn tensor_name(&self, tensor: usize) -> String {
        match tensor.checked_sub(self.operands) {
            None => format!("operands[{tensor}]"),
            Some(result) => format!("results[{result}]"),
        }
    }

    /// The rule with the sizes that these shapes give its factors.
    ///
    /// # Errors
    /// [`Error::FactorRule`] if the shapes are not as many as its tensors or have other ranks; if a dim is not the product
    /// of its factors; if a size stays unknown. Factors that are `whole` or `shift` may be of another size than a dim.
    pub fn sized(&self, shapes: &[&[i64]]) -> Result<Self> {
        let refused = |why: String| Error::FactorRule { rule: self.to_string(), why };
        if shapes.len() != self.tensors() {
            let given = shown::counted(&shapes.len(), "shape was", "shapes were");
            let why = format!("it has {} operands and results, but {given} given", self.tensors());
            return Err(refused(why));
        }
        let mut rule = self.clone();
        // A size may follow from one that a later dim gives.
        for last in [false, false, true] {
            for (tensor, shape) in shapes.iter().enumerate() {
                if shape.len() != self.rank(tensor) {
                    let name = self.tensor_name(tensor);
                    let dims = shown::counted(&self.rank(tensor), "dim", "dims");
                    let why = format!("{name} has the shape {}, but {dims} in the rule", shown::list(shape));
                    return Err(refused(why));
                }
                for (dim, size) in shape.iter().enumerate() {
                    rule.fit(tensor, dim, *size, last).map_err(refused)?;
                }
            }
        }
        Ok(rule)
    }

    /// Takes over from the size of a dim that of its only factor without one, or compares.
    fn fit(&mut self, tensor: usize, dim: usize, size: i64, last: bool) -> std::result::Result<(), String> {
        let of_dim = self.dim(tensor, dim);
        let unknown = of_dim.iter().filter(|factor| self.factors[**factor as usize].size == UNKNOWN).count();
        let known = of_dim.iter().map(|factor| self.factors[*factor as usize].size).filter(|size| *size != UNKNOWN);
        let known = known.fold(1_i64, |product, size| product.saturating_mul(size));
        let free = of_dim.iter().any(|factor| matches!(self.factors[*factor as usize].kind, Kind::Whole | Kind::Shift));
        let name = self.tensor_name(tensor);
        if unknown == 1 && (known == 0 || size % known != 0) {
            return Err(format!(
                "dim {dim} of {name} is {size}, not a multiple of {known}, the product of its factors"
            ));
        }
        if unknown == 1 {
            let at = of_dim.iter().position(|factor| self.factors[*factor as usize].size == UNKNOWN);
            let at = of_dim[at.unwrap_or(0)] as usize;
            self.factors[at].size = size / known;
        } else if unknown > 1 && last {
            return Err(format!("dim {dim} of {name} has {unknown} factors of no known size; give `sizes`"));
        } else if unknown == 0 && known != size && !free {
            return Err(format!("dim {dim} of {name} is {size}, but its factors make {known}"));
        }
        Ok(())
    }
}

/// The dims of a tensor among those of all, of which these are the ends.
#[inline]
fn dims_of(tensors: &[u32], tensor: usize) -> Range<usize> {
    (if tensor == 0 { 0 } else { tensors[tensor - 1] as usize })..tensors[tensor] as usize
}

/// A rule in the making.
#[derive(Debug)]
pub(crate) struct Builder {
    /// The ends of the dims of each tensor among those of all.
    pub(super) tensors: Vec<u32>,
    pub(super) operands: usize,
    pub(super) factors: Vec<Factor>,
    pub(super) reduction: Reduction,
    /// Dims, of those of all tensors, each with a factor.
    pub(super) placed: Vec<[u32; 2]>,
}

impl Builder {
    pub(crate) fn new<'a>(operands: &[&'a [i64]], results: &[&'a [i64]]) -> Self {
        let mut dims = 0;
        let end = |shape: &&[i64]| {
            dims += shape.len() as u32;
            dims
        };
        let tensors = operands.iter().chain(results).map(end).collect();
        let (placed, factors) = (Vec::with_capacity(dims as usize), Vec::with_capacity(8));
        Self { tensors, operands: operands.len(), factors, reduction: Reduction::Add, placed }
    }

    pub(crate) fn reduced_by(&mut self, reduction: Reduction) {
        self.reduction = reduction;
    }

    /// A factor at a dim of each of some tensors: operands first, then results. One of size 1 does not go beside others.
    pub(crate) fn factor(&mut self, at: &[(usize, usize)], size: i64, kind: Kind) -> &mut Factor {
        let number = self.factors.len() as u32;
        for (tensor, dim) in at {
            let dim = (dims_of(&self.tensors, *tensor).start + dim) as u32;
            if size != 1 || !self.placed.iter().any(|[known, _]| *known == dim) {
                self.placed.push([dim, number]);
            }
        }
        self.push(size, kind)
    }

    /// A factor at this dim of every tensor that has dims.
    pub(crate) fn everywhere(&mut self, dim: usize, size: i64, kind: Kind) -> &mut Factor {
        let number = self.factors.len() as u32;
        let dims = (0..self.tensors.len()).map(|tensor| dims_of(&self.tensors, tensor));
        self.placed.extend(dims.filter(|dims| !dims.is_empty()).map(|dims| [(dims.start + dim) as u32, number]));
        self.push(size, kind)
    }

    #[inline]
    fn push(&mut self, size: i64, kind: Kind) -> &mut Factor {
        self.factors.push(Factor { size, kind, blocked: false });
        let last = self.factors.len() - 1;
        &mut self.factors[last]
    }

    /// The rule; a dim without a factor gets one of size 1.
    pub(crate) fn build(self) -> Rule {
        let Self { tensors, operands, mut factors, reduction, mut placed } = self;
        // Stable: the factors of a dim stay in the order in which they came.
        placed.sort_by_key(|[dim, _]| *dim);
        let count = tensors.last().map_or(0, |end| *end as usize);
        let mut places = Vec::with_capacity(count + placed.len().max(count));
        places.resize(count, 0);
        let mut next = placed.iter().peekable();
        for dim in 0..count {
            let before = places.len();
            while let Some([_, factor]) = next.next_if(|[at, _]| *at as usize == dim) {
                places.push(*factor);
            }
            if places.len() == before {
                places.push(factors.len() as u32);
                factors.push(Factor { size: 1, kind: Kind::Pass, blocked: false });
            }
            places[dim] = places.len() as u32;
        }
        Rule { factors, reduction, operands, tensors, places, names: None }
    }
}
