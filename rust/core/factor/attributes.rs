//! Attributes: all that an op says of itself besides its operands: numbers, lists of them, names.

use std::borrow::Cow;

use crate::{
    error::{Error, Result},
    shown::counted,
};

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    /// A number, or a truth value as 0 or 1.
    Integer(i64),
    /// Numbers.
    Integers(Vec<i64>),
    /// Pairs of numbers.
    Pairs(Vec<[i64; 2]>),
    /// A word.
    Word(String),
    /// Words and numbers, as text.
    Words(Vec<String>),
}

impl Attribute {
    fn kind(&self) -> &'static str {
        match self {
            Self::Integer(_) => "an integer",
            Self::Integers(_) => "a list of integers",
            Self::Pairs(_) => "a list of pairs of integers",
            Self::Word(_) => "a word",
            Self::Words(_) => "a list of names and numbers of dims",
        }
    }
}

/// The attributes of an op by their names.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Attributes<'a>(pub Vec<(&'a str, Attribute)>);

/// An op's name and attributes, to ask for the latter with errors that name the former.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Of<'a> {
    pub(crate) op: &'a str,
    attributes: &'a [(&'a str, Attribute)],
}

impl<'a> Of<'a> {
    pub(crate) fn new(op: &'a str, attributes: &'a Attributes<'a>) -> Self {
        Self { op, attributes: &attributes.0 }
    }

    pub(crate) fn refused(self, why: impl Into<String>) -> Error {
        Error::Op { op: self.op.to_owned(), why: why.into() }
    }

    #[inline]
    fn find(self, name: &str) -> Option<&'a Attribute> {
        self.attributes.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    fn wrong(self, name: &str, wanted: &str) -> Error {
        self.refused(match self.find(name) {
            Some(found) => format!("attribute `{name}` must be {wanted}, but is {}", found.kind()),
            None => format!("attribute `{name}` is missing; it must be {wanted}"),
        })
    }

    pub(crate) fn integer(self, name: &str) -> Result<i64> {
        match self.find(name) {
            Some(Attribute::Integer(value)) => Ok(*value),
            _ => Err(self.wrong(name, "an integer")),
        }
    }

    /// The number, or `default` if there is none of the name.
    pub(crate) fn integer_or(self, name: &str, default: i64) -> Result<i64> {
        if self.find(name).is_none() { Ok(default) } else { self.integer(name) }
    }

    pub(crate) fn integers(self, name: &str) -> Result<&'a [i64]> {
        self.listed(name, None)
    }

    /// The numbers, or none if there is none of the name.
    #[inline]
    pub(crate) fn integers_or(self, name: &str) -> Result<&'a [i64]> {
        self.listed(name, Some(&[]))
    }

    #[inline]
    fn listed(self, name: &str, default: Option<&'a [i64]>) -> Result<&'a [i64]> {
        match self.find(name) {
            Some(Attribute::Integers(values)) => Ok(values),
            Some(Attribute::Pairs(values)) if values.is_empty() => Ok(&[]),
            None if default.is_some() => Ok(default.unwrap_or(&[])),
            _ => Err(self.wrong(name, "a list of integers")),
        }
    }

    fn pairs(self, name: &str) -> Result<&'a [[i64; 2]]> {
        match self.find(name) {
            Some(Attribute::Pairs(values)) => Ok(values),
            Some(Attribute::Integers(values)) if values.is_empty() => Ok(&[]),
            _ => Err(self.wrong(name, "a list of pairs of integers")),
        }
    }

    pub(crate) fn word(self, name: &str) -> Result<&'a str> {
        match self.find(name) {
            Some(Attribute::Word(value)) => Ok(value),
            _ => Err(self.wrong(name, "a word")),
        }
    }

    pub(crate) fn words(self, name: &str) -> Result<&'a [String]> {
        match self.find(name) {
            Some(Attribute::Words(values)) => Ok(values),
            _ => Err(self.wrong(name, "a list of names and numbers of dims")),
        }
    }

    /// Dims of a tensor of `rank` dims: in range, each once.
    pub(crate) fn dims(self, name: &str, rank: usize) -> Result<Vec<usize>> {
        let given = self.integers_or(name)?;
        let mut dims = Vec::with_capacity(given.len());
        for dim in given {
            match usize::try_from(*dim) {
                Ok(dim) if dim < rank && !dims.contains(&dim) => dims.push(dim),
                _ => {
                    let why = format!("`{name}` is {given:?}; it must list dims of a tensor of rank {rank}, each once");
                    return Err(self.refused(why));
                }
            }
        }
        Ok(dims)
    }

    /// A dim of a tensor of `rank` dims.
    pub(crate) fn dim(self, name: &str, rank: usize) -> Result<usize> {
        let given = self.integer(name)?;
        let dim = usize::try_from(given).ok().filter(|dim| *dim < rank);
        dim.ok_or_else(|| self.refused(format!("`{name}` is {given}; it must be at least 0 and less than {rank}")))
    }

    /// A pair of numbers for each of `rank` dims.
    pub(crate) fn each_pair(self, name: &str, rank: usize) -> Result<&'a [[i64; 2]]> {
        let given = self.pairs(name)?;
        if given.len() == rank {
            return Ok(given);
        }
        Err(self.refused(not_each(name, given.len(), rank)))
    }

    /// One number for each of `rank` dims.
    pub(crate) fn each(self, name: &str, rank: usize) -> Result<&'a [i64]> {
        let given = self.integers(name)?;
        if given.len() == rank {
            return Ok(given);
        }
        Err(self.refused(not_each(name, given.len(), rank)))
    }
    /// One number for each of `rank` dims, or ones if there is none of the name.
    pub(crate) fn each_or_ones(self, name: &str, rank: usize) -> Result<Cow<'a, [i64]>> {
        if self.integers_or(name)?.is_empty() { Ok(vec![1; rank].into()) } else { Ok(self.each(name, rank)?.into()) }
    }
}

/// The mistake in a list that should have an entry for each dim.
pub(super) fn not_each(name: &str, entries: usize, dims: usize) -> String {
    let [entries, dims] = [counted(&entries, "entry", "entries"), counted(&dims, "dim", "dims")];
    format!("`{name}` has {entries} for {dims}")
}
