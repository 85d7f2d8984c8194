//! The turns of a plan: the same boxes as holder by holder, in another order.

use super::super::{turns::OneSource, *};
use crate::parallel::never;

/// A transfer that is kept: source, its piece, destination, its piece, and the sides of the box.
type Kept = ([i64; 4], Vec<(i64, i64)>);

fn kept(transfer: Transfer<'_>) -> Kept {
    let Transfer { source, source_piece, destination, destination_piece, region } = transfer;
    ([source, source_piece, destination, destination_piece], region.sides().collect())
}

/// What each turn from `first` on shows, and the one source that it says to have.
fn turns_from(plan: &Plan, holders: &Range<usize>, first: usize) -> Vec<(Option<OneSource>, Vec<Kept>)> {
    let mut turns = plan.turns(holders.clone());
    let count = turns.count();
    turns.skip(first);
    let mut seen = Vec::new();
    for _ in first..count {
        let one = turns.next_of_one_source();
        let mut boxes = Vec::new();
        let mut add = |transfer: Transfer<'_>| {
            boxes.push(kept(transfer));
            Ok(())
        };
        turns.visit_next(&mut add).unwrap();
        seen.push((one, boxes));
    }
    assert_eq!(turns.next_of_one_source(), None);
    assert_eq!(turns.count(), count);
    seen
}

/// That the turns of all ranges show each box of the first addend once, to the holders in order, and that those of one
/// source are as they say.
pub(super) fn check(plan: &Plan) {
    let ranges = plan.ranges(2);
    for holders in if ranges.len() > 1 { ranges } else { Vec::new() } {
        let mut expected = Vec::new();
        let mut add = |transfer: Transfer<'_>| {
            if plan.addend_of(transfer.source) == 0 {
                expected.push(kept(transfer));
            }
            Ok(())
        };
        plan.visit_kept(holders.clone(), &mut add).unwrap();
        plan.visit_transfers(holders.clone(), &mut never, &mut add).unwrap();
        let turns = turns_from(plan, &holders, 0);
        let mut seen: Vec<Kept> = turns.iter().flat_map(|(_, boxes)| boxes.clone()).collect();
        seen.sort_unstable();
        expected.sort_unstable();
        assert_eq!(seen, expected);
        for (_, boxes) in &turns {
            assert!(boxes.is_sorted_by(|(a, _), (b, _)| a[2] < b[2]), "{boxes:?}");
        }
        for first in [1, turns.len() / 2, turns.len()].into_iter().filter(|&first| first <= turns.len()) {
            assert_eq!(turns_from(plan, &holders, first), turns[first..]);
        }
        for ((one, boxes), (_, first)) in turns.iter().zip(turns.iter().take(1).cycle()) {
            let Some(OneSource { source, dim, start, stop }) = *one else { continue };
            assert_eq!(boxes.len(), holders.len());
            for ((numbers, sides), (_, others)) in boxes.iter().zip(first) {
                assert_eq!((numbers[0], sides[dim]), (source, (start, stop)));
                assert!(sides.iter().zip(others).enumerate().all(|(other, (a, b))| other == dim || a == b));
            }
        }
    }
}

#[test]
fn rows_to_columns_are_of_one_source_in_each_turn_and_blocks_are_not() {
    let cut = |specs: &[&[&str]]| super::cut(&[2, 2], specs, &[8, 8]);
    let plan = |from, to| Plan::new(cut(from), cut(to), vec![-1; 4], &mut never).unwrap();
    let all = plan(&[&["a", "b"], &[]], &[&[], &["a", "b"]]);
    let ones: Vec<_> = turns_from(&all, &(0..4), 0).into_iter().map(|(one, _)| one.unwrap()).collect();
    let expected = [0, 1, 2, 3].map(|i| OneSource { source: i, dim: 0, start: 2 * i, stop: 2 * i + 2 });
    assert_eq!(ones, expected);
    // Columns 0..4 and 4..8, rows 0..4 and 4..8: the quarters of a half are of two sources.
    let blocks = plan(&[&["a"], &["b"]], &[&[], &["a", "b"]]);
    assert!(turns_from(&blocks, &(0..4), 0).iter().all(|(one, _)| one.is_none()));
    assert!(turns_from(&blocks, &(0..2), 0).iter().all(|(one, _)| one.is_some()));
}
