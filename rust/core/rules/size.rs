//! The size of an expression once its counted repetitions are written out.
//!
//! What a search costs for each byte of a path grows with the states of the automaton. Those of an expression are as many as
//! it has characters, but for counted repetitions: `((a{1,50}){1,50}){1,50}` stands for 125,000. So what these add is
//! bounded before anything is compiled.

use regex_syntax::hir::{Class, Hir, HirKind};

/// The most steps that the counted repetitions of one expression may add.
pub const MOST_REPEATED: u64 = 1_000;

/// The most that those of all expressions of a set may add.
pub const MOST_OF_ALL: u64 = 16_000;

/// The ranges of a class that count as one more step: a class such as `\w` beyond ASCII has hundreds.
const RANGES_PER_STEP: usize = 64;

/// The steps that the counted repetitions of an expression of the `regex` crate add when they are written out, beyond those
/// that it has if each repeats once; none for one that this crate does not read, and so never compiles.
pub(super) fn repeated(expression: &str) -> u64 {
    let mut parser = regex_syntax::ParserBuilder::new().unicode(false).utf8(false).build();
    parser.parse(&format!("(?u:{expression})")).map_or(0, |hir| {
        let (once, written_out) = steps(&hir);
        written_out - once
    })
}

/// The steps of an expression, each repetition taken once, and each written out.
fn steps(hir: &Hir) -> (u64, u64) {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => (1, 1),
        HirKind::Literal(literal) => {
            let bytes = literal.0.len() as u64;
            (bytes, bytes)
        }
        HirKind::Class(class) => {
            let ranges = match class {
                Class::Unicode(class) => class.ranges().len(),
                Class::Bytes(class) => class.ranges().len(),
            };
            let found = 1 + (ranges / RANGES_PER_STEP) as u64;
            (found, found)
        }
        HirKind::Repetition(repetition) => {
            let (once, written_out) = steps(&repetition.sub);
            let times = repetition.max.unwrap_or(repetition.min).max(1);
            (once, written_out.saturating_mul(times.into()))
        }
        HirKind::Capture(capture) => steps(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => {
            parts.iter().map(steps).fold((0, 0), |(once, all), (one, out)| (once + one, all.saturating_add(out)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_repetitions_add_what_they_are_written_out() {
        assert_eq!(repeated(r"layers\.[0-9]+\.(?:q|k)*x?"), 0);
        assert_eq!(repeated("a{3}"), 2);
        assert_eq!(repeated("a{2,5}b"), 4);
        assert_eq!(repeated("(?:ab){4,}"), 6);
        assert_eq!(repeated("(?:(?:[a-z.]{1,50}){1,50}){1,50}c0"), 125_000 - 1);
        // The hundreds of ranges of `\w` take more than one step.
        assert!(repeated(r"\w{1,100}") > 500);
        let mut nested = "a".to_owned();
        (0..20).for_each(|_| nested = format!("(?:{nested}){{1,999}}"));
        assert!(repeated(&nested) > MOST_OF_ALL);
    }
}
