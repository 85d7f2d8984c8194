//! The assignment of rows to columns that costs least, each column once: Kuhn and Munkres' method with potentials.
//!
//! Rows are added one by one. Each takes the shortest augmenting path through the columns that are taken already, with
//! costs made non-negative by potentials of rows and columns; so after each row the assignment of the rows so far costs
//! least. It takes `O(n³)` steps.

/// The largest cost that is taken: sums of potentials then stay far below 2^63.
pub const MOST: i64 = 1 << 40;

/// Returns the column of each row of a square matrix, rows one after the other, so that the sum of its costs is least.
///
/// It is `None` if the matrix is not square, or a cost is negative or over [`MOST`].
///
/// ```
/// use shardwise_core::assignment::least;
/// assert_eq!(least(&[4, 1, 3, 2, 0, 5, 3, 2, 2], 3), Some(vec![1, 0, 2]));
/// assert_eq!(least(&[4, 1], 2), None);
/// ```
#[must_use]
pub fn least(costs: &[i64], size: usize) -> Option<Vec<usize>> {
    if size.checked_mul(size) != Some(costs.len()) || costs.iter().any(|cost| !(0..=MOST).contains(cost)) {
        return None;
    }
    // Column 0 stands for the row that is being added; rows and columns are counted from 1.
    let (mut of_row, mut of_column) = (vec![0_i64; size + 1], vec![0_i64; size + 1]);
    let mut row_at = vec![0_usize; size + 1];
    for row in 1..=size {
        row_at[0] = row;
        let mut column = 0;
        let mut distance = vec![i64::MAX; size + 1];
        let mut before = vec![0_usize; size + 1];
        let mut is_done = vec![false; size + 1];
        while row_at[column] != 0 {
            is_done[column] = true;
            let from = row_at[column];
            let (mut step, mut next) = (i64::MAX, 0);
            for to in 1..=size {
                if is_done[to] {
                    continue;
                }
                let reduced = costs[(from - 1) * size + to - 1] - of_row[from] - of_column[to];
                if reduced < distance[to] {
                    distance[to] = reduced;
                    before[to] = column;
                }
                if distance[to] < step {
                    step = distance[to];
                    next = to;
                }
            }
            for to in 0..=size {
                if is_done[to] {
                    of_row[row_at[to]] += step;
                    of_column[to] -= step;
                } else if distance[to] != i64::MAX {
                    distance[to] -= step;
                }
            }
            column = next;
        }
        while column != 0 {
            row_at[column] = row_at[before[column]];
            column = before[column];
        }
    }
    let mut found = vec![0; size];
    for column in 1..=size {
        found[row_at[column] - 1] = column - 1;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least cost of all permutations.
    fn by_trying(costs: &[i64], size: usize, row: usize, taken: &mut Vec<usize>) -> i64 {
        if row == size {
            return 0;
        }
        let mut least = i64::MAX;
        for column in 0..size {
            if !taken.contains(&column) {
                taken.push(column);
                least = least.min(costs[row * size + column] + by_trying(costs, size, row + 1, taken));
                taken.pop();
            }
        }
        least
    }

    #[test]
    fn no_permutation_costs_less() {
        let mut state = 1_u64;
        for size in 0..=6 {
            for _ in 0..200 {
                let costs: Vec<i64> = (0..size * size)
                    .map(|_| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        i64::from((state >> 60) as u8)
                    })
                    .collect();
                let found = least(&costs, size).unwrap();
                let mut columns = found.clone();
                columns.sort_unstable();
                assert_eq!(columns, (0..size).collect::<Vec<_>>());
                let cost: i64 = found.iter().enumerate().map(|(row, column)| costs[row * size + column]).sum();
                assert_eq!(cost, by_trying(&costs, size, 0, &mut Vec::new()), "{costs:?}");
            }
        }
    }

    #[test]
    fn what_is_no_square_of_costs_is_refused() {
        assert!(least(&[1, 2], 2).is_none() && least(&[-1], 1).is_none() && least(&[MOST + 1], 1).is_none());
    }
}
