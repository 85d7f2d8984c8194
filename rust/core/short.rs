//! Lists as short as the dims of an array.

/// Sorts a few items by a key: by insertion, so equal ones stay in order, and a list of thousands takes long.
///
/// The sort of the standard library inserts up to twenty items as well, and is five kilobytes of code for each kind of key.
pub fn sort_by_key<T, K: Ord>(items: &mut [T], mut key: impl FnMut(&T) -> K) {
    for last in 1..items.len() {
        let mut at = last;
        while at > 0 && key(&items[at]) < key(&items[at - 1]) {
            items.swap(at, at - 1);
            at -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_the_stable_sort_of_the_standard_library(items in prop::collection::vec((0..4_i64, 0..9_i64), 0..30)) {
            let (mut ours, mut theirs) = (items.clone(), items);
            sort_by_key(&mut ours, |item| item.0);
            theirs.sort_by_key(|item| item.0);
            prop_assert_eq!(ours, theirs);
        }
    }
}
