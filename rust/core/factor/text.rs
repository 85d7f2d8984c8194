//! Rules as text: `([i,k],[k,j])->([i,j])`. A factor is a letter, or a letter with a number, such as `z_1`; a dim is its
//! factors, one after the other, major first.

use std::fmt;

use super::rule::{Builder, Factor, Kind, Reduction, Rule, UNKNOWN};
use crate::error::{Error, Result};

/// The most characters that the text of a rule has.
pub const LONGEST: usize = 1 << 14;

impl fmt::Display for Rule {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for tensor in 0..self.tensors() {
            if tensor == 0 || tensor == self.operands() {
                let empty = if self.operands() == 0 { "()->(" } else { ")->(" };
                out.write_str(if tensor == self.operands() { empty } else { "(" })?;
            } else {
                out.write_str(",")?;
            }
            let dims = (0..self.rank(tensor))
                .map(|dim| self.dim(tensor, dim).iter().map(|number| self.name(*number as usize)).collect::<String>());
            write!(out, "[{}]", dims.collect::<Vec<_>>().join(","))?;
        }
        out.write_str(")")
    }
}

impl Rule {
    /// The rule that a text says, whose factors are `pass`, but for those named in `kinds`, and of the sizes in `sizes`, or
    /// of none that is known yet. `blocked` names those whose cut stays where it is. Factors are numbered as in `order`, others
    /// after them as they come.
    ///
    /// # Errors
    /// [`Error::FactorRule`].
    ///
    /// ```
    /// use shardwise_core::factor::{Kind, Reduction, Rule};
    /// let rule = Rule::parse("([i,k],[k,j])->([i,j])", &[("k", Kind::Sum)], &[], &[], Reduction::Add, &[])?;
    /// assert_eq!(rule.sized(&[&[4, 8], &[8, 2], &[4, 2]])?.factors()[1].size, 8);
    /// # Ok::<(), shardwise_core::error::Error>(())
    /// ```
    pub fn parse(
        text: &str,
        kinds: &[(&str, Kind)],
        blocked: &[&str],
        sizes: &[(&str, i64)],
        reduction: Reduction,
        order: &[&str],
    ) -> Result<Self> {
        let refused = |why: &str| Error::FactorRule { rule: text.to_owned(), why: why.to_owned() };
        if text.len() > LONGEST {
            return Err(refused("it is too long"));
        }
        let plain: String = text.chars().filter(|letter| *letter != ' ').collect();
        let form = "it is not of the form ([i,k],[k,j])->([i,j])";
        let sides = plain.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
        let (operands, results) = sides.and_then(|rest| rest.split_once(")->(")).ok_or_else(|| refused(form))?;
        let mut names: Vec<&str> = order.to_vec();
        let (mut tensors, mut placed, mut count) = (Vec::new(), Vec::new(), 0);
        for (side, result) in [(operands, false), (results, true)] {
            let inside = side.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
            let texts: Vec<&str> = match inside {
                Some(inside) => inside.split("],[").collect(),
                None if side.is_empty() && !result => Vec::new(),
                None => return Err(refused(form)),
            };
            count += if result { 0 } else { texts.len() };
            for tensor in texts {
                let first = tensors.last().copied().unwrap_or(0);
                let dims: Vec<&str> = if tensor.is_empty() { Vec::new() } else { tensor.split(',').collect() };
                for (at, dim) in dims.iter().enumerate() {
                    for factor in split(dim).ok_or_else(|| refused(form))? {
                        let known = names.iter().position(|name| *name == factor);
                        if known.is_none() {
                            names.push(factor);
                        }
                        placed.push([first + at as u32, known.unwrap_or(names.len() - 1) as u32]);
                    }
                }
                tensors.push(first + dims.len() as u32);
            }
        }
        let mut factors = vec![Factor { size: UNKNOWN, kind: Kind::Pass, blocked: false }; names.len()];
        let number = |name: &str| {
            let found = names.iter().position(|known| *known == name);
            found.ok_or_else(|| refused(&format!("it has no factor {name:?}")))
        };
        for (name, kind) in kinds {
            let factor = &mut factors[number(name)?];
            if factor.kind != Kind::Pass && factor.kind != *kind {
                return Err(refused(&format!(
                    "factor {name:?} is named as {} and as {}",
                    factor.kind.name(),
                    kind.name()
                )));
            }
            factor.kind = *kind;
        }
        for name in blocked {
            factors[number(name)?].blocked = true;
        }
        for (name, size) in sizes {
            if *size < 0 {
                return Err(refused(&format!("the size of factor {name:?} is {size}; it must be at least 0")));
            }
            factors[number(name)?].size = *size;
        }
        let mut rule = Builder { tensors, operands: count, factors, reduction, placed }.build();
        rule.names = Some(names.into_iter().map(str::to_owned).collect());
        rule.check().map_err(|why| refused(&why))?;
        Ok(rule)
    }

    /// Checks that it is one: each factor once in a tensor, one that is summed in no result.
    fn check(&self) -> std::result::Result<(), String> {
        for tensor in 0..self.tensors() {
            let mut seen = vec![false; self.factors.len()];
            for number in (0..self.rank(tensor)).flat_map(|dim| self.dim(tensor, dim)) {
                if std::mem::replace(&mut seen[*number as usize], true) {
                    let (name, tensor) = (self.name(*number as usize), self.tensor_name(tensor));
                    return Err(format!("the same factor {name:?} is twice in {tensor}"));
                }
                if tensor >= self.operands() && self.factors[*number as usize].kind == Kind::Sum {
                    return Err(format!(
                        "a summed factor is in {}; results have no summed factors",
                        self.tensor_name(tensor)
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The factors of a dim: letters, each perhaps with `_` and a number.
fn split(dim: &str) -> Option<Vec<&str>> {
    let mut factors = Vec::new();
    let mut rest = dim;
    while !rest.is_empty() {
        if !rest.starts_with(|letter: char| letter.is_ascii_alphabetic()) {
            return None;
        }
        let after = match rest[1..].strip_prefix('_') {
            None => 1,
            Some(number) => {
                let digits = number.bytes().take_while(u8::is_ascii_digit).count();
                if digits == 0 {
                    return None;
                }
                2 + digits
            }
        };
        let (factor, tail) = rest.split_at(after);
        factors.push(factor);
        rest = tail;
    }
    if factors.is_empty() { None } else { Some(factors) }
}
