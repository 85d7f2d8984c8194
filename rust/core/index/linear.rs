//! Numbers that are linear in a device's coordinate, for many devices in a row.
//!
//! A shard id, a shard index along a dim, a replica id and each entry of the coordinate itself are all of the form
//! `Σ coordinate[axis] · weight[axis]`. Filling them for consecutive devices needs no division: neighbouring axes whose
//! weights fit together are merged, and then the last axis is a ramp, stepped through by an odometer over the others.

use crate::radix;

/// `Σ coordinate[axis] · weight[axis]` as a function of the device index.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    /// The axes that are left after merging, as (size, weight), major first; never empty.
    axes: Vec<(i64, i64)>,
}

impl Linear {
    /// The function with the given weight for each axis of `sizes`. Its largest value must fit in 63 bits.
    pub(crate) fn new(sizes: &[i64], weight: impl Fn(usize) -> i64) -> Self {
        let mut axes: Vec<(i64, i64)> = Vec::with_capacity(sizes.len());
        for (axis, &size) in sizes.iter().enumerate().filter(|&(_, &size)| size > 1) {
            let weight = weight(axis);
            match axes.last_mut() {
                // A step along the major axis equals a whole turn of the minor one: one longer ramp.
                Some(major) if major.1 == weight * size => *major = (major.0 * size, weight),
                _ => axes.push((size, weight)),
            }
        }
        if axes.is_empty() {
            axes.push((1, 0));
        }
        Self { axes }
    }

    /// The value at one device index.
    #[inline]
    pub(crate) fn at(&self, mut device: i64) -> i64 {
        let mut value = 0;
        for &(size, weight) in self.axes.iter().rev() {
            value += device % size * weight;
            device /= size;
        }
        value
    }

    /// Writes the values of the devices from `start` on into `out[column]`, `out[column + step]`, …
    pub(crate) fn fill(&self, start: i64, out: &mut [i64], column: usize, step: usize) {
        let (inner, ramp) = self.axes[self.axes.len() - 1];
        let outer = &self.axes[..self.axes.len() - 1];
        let sizes: Vec<i64> = outer.iter().map(|&(size, _)| size).collect();
        let mut digits = radix::unravel(start / inner, &sizes);
        let mut base: i64 = digits.iter().zip(outer).map(|(digit, (_, weight))| digit * weight).sum();
        let mut at = start % inner;
        let count = out.len() / step;
        let mut done = 0;
        while done < count {
            let run = usize::try_from(inner - at).unwrap_or(usize::MAX).min(count - done);
            let mut value = base + at * ramp;
            let rows = &mut out[done * step..(done + run) * step];
            // The step past the last value of a run may leave the range; it is never stored.
            if step == 1 {
                for place in rows {
                    *place = value;
                    value = value.wrapping_add(ramp);
                }
            } else {
                for row in rows.chunks_exact_mut(step) {
                    row[column] = value;
                    value = value.wrapping_add(ramp);
                }
            }
            done += run;
            at = 0;
            for (digit, &(size, weight)) in digits.iter_mut().zip(outer).rev() {
                if *digit + 1 < size {
                    *digit += 1;
                    base += weight;
                    break;
                }
                base -= *digit * weight;
                *digit = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fill_is_the_sum_over_the_coordinate(
            sizes in prop::collection::vec(1..5_i64, 1..5),
            weights in prop::collection::vec(0..7_i64, 4),
            start in 0..700_i64,
            step in 1..4_usize,
        ) {
            let size: i64 = sizes.iter().product();
            let linear = Linear::new(&sizes, |axis| weights[axis]);
            let start = start % size;
            let mut out = vec![-1; (size - start) as usize * step];
            linear.fill(start, &mut out, step - 1, step);
            for (i, row) in out.chunks(step).enumerate() {
                let device = start + i as i64;
                let by_hand: i64 = radix::unravel(device, &sizes).iter().zip(&weights).map(|(c, w)| c * w).sum();
                prop_assert_eq!(row[step - 1], by_hand);
                prop_assert_eq!(linear.at(device), by_hand);
                prop_assert!(row[..step - 1].iter().all(|&x| x == -1));
            }
        }
    }
}
