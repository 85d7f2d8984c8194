//! An op whose rule is asked for, and what must hold of it.

use crate::{
    error::Result,
    factor::{
        attributes::Of,
        rule::{Builder, Kind, Reduction, Rule},
    },
    shown::counted,
};

/// An op with its operands and results.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) of: Of<'a>,
    pub(super) operands: &'a [&'a [i64]],
    pub(super) results: &'a [&'a [i64]],
}

impl Given<'_> {
    pub(super) fn builder(self) -> Builder {
        Builder::new(self.operands, self.results)
    }

    /// A rule in the making in which the first dims of all tensors pass: those of a batch.
    pub(super) fn passing(self, dims: &[i64]) -> Builder {
        let mut builder = self.builder();
        for (dim, size) in dims.iter().enumerate() {
            builder.everywhere(dim, *size, Kind::Pass);
        }
        builder
    }

    pub(super) fn ensure(self, holds: bool, why: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { Err(self.of.refused(why())) }
    }

    /// So many operands and results, none of them with a negative dim.
    pub(super) fn counted(self, operands: usize, results: usize) -> Result<()> {
        let given = (self.operands.len(), self.results.len());
        self.ensure(given == (operands, results), || {
            let operands = counted(&operands, "operand", "operands");
            let results = counted(&results, "result", "results");
            format!("it has {operands} and {results}, but {} and {} were given", given.0, given.1)
        })?;
        let negative = self.operands.iter().chain(self.results).find(|shape| shape.iter().any(|size| *size < 0));
        negative.map_or(Ok(()), |shape| Err(self.of.refused(format!("the shape {shape:?} has a negative dim"))))
    }

    /// At least one operand, and as many results as `results`.
    pub(super) fn at_least_one(self, results: usize) -> Result<()> {
        self.ensure(!self.operands.is_empty(), || "it needs at least one operand, but none was given".to_owned())?;
        self.counted(self.operands.len(), results)
    }

    /// A result of the shape that follows from the operands.
    pub(super) fn result<'b>(self, number: usize, expected: impl IntoIterator<Item = &'b i64> + Clone) -> Result<()> {
        let given = self.results[number];
        self.ensure(given.iter().eq(expected.clone()), || {
            let expected: Vec<_> = expected.into_iter().collect();
            format!("results[{number}] has the shape {given:?}; by its operands it must be {expected:?}")
        })
    }

    /// An operand of the shape that follows from others.
    pub(super) fn operand(self, number: usize, expected: &[i64]) -> Result<()> {
        self.ensure(self.operands[number] == expected, || {
            let given = self.operands[number];
            format!("operands[{number}] has the shape {given:?}; with these other operands it must be {expected:?}")
        })
    }

    /// The reduction that the attribute `body` names; none if it is `or`, which adds nothing up.
    pub(super) fn reduction(self, or: Option<&str>) -> Result<Option<Reduction>> {
        let body = self.of.word("body")?;
        let reduction = Reduction::named(body);
        self.ensure(reduction.is_some() || or == Some(body), || {
            let names: Vec<_> = or.into_iter().chain(Reduction::ALL.iter().map(|(_, name)| *name)).collect();
            format!("`body` is {body:?}; it must be one of {names:?}")
        })?;
        Ok(reduction)
    }

    /// An operand of at least so many dims.
    pub(super) fn rank(self, number: usize, least: usize) -> Result<()> {
        let given = self.operands[number].len();
        self.ensure(given >= least, || {
            format!("operands[{number}] has {}; at least {least} are needed", counted(&given, "dim", "dims"))
        })
    }
}

/// The rule of an op whose tensors all have the dims of the first result, or none.
pub(super) fn all_alike(given: Given<'_>, kind: impl Fn(usize) -> Kind) -> Rule {
    let mut builder = given.builder();
    for (dim, size) in given.results[0].iter().enumerate() {
        builder.everywhere(dim, *size, kind(dim));
    }
    builder.build()
}
