//! Two meshes that are views of one list of devices, and the sub-axes that they have in common (rule 2.8).
//!
//! A mesh of shape `[a, b, c]` writes a device index in mixed radix; its digits have the strides `[bc, c, 1]`. A second
//! mesh over the same devices, perhaps in the order of a transposition, writes it with other digits. Where the strides of
//! both are one chain of divisors, the quotients of neighbours in the chain are the sizes of the sub-axes that both
//! have: `(8,)` and `(2, 4)` have `(2, 4)`; `(2, 4)` and `(4, 2)` have `(2, 2, 2)`; `(6, 4)` and `(4, 6)` have none,
//! for neither of the strides 4 and 6 divides the other.

use super::Obstacle;
use crate::{
    layout::Layout,
    mesh::Mesh,
    short,
    sub_axis::{self, SubAxis},
};

/// A factor of the number of devices that is a sub-axis of both meshes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Factor {
    /// The factor as a sub-axis of the source's mesh.
    pub sub_axis: SubAxis,
    /// The position of the axis of the destination's mesh that it is part of.
    pub destination_axis: usize,
    /// The distance of its neighbours among the devices of the source's mesh.
    stride: i64,
    /// The distance of its neighbours among the devices of the destination's mesh.
    step: i64,
}

/// A mesh, and the same with the axes factored that a layout uses in parts.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The mesh of the layout.
    pub refined: &'a Mesh,
}

impl<'a> From<&'a Mesh> for Side<'a> {
    fn from(mesh: &'a Mesh) -> Self {
        Self { mesh, refined: mesh }
    }
}

/// The common sub-axes of two meshes, in the order of the source's axes, major first; each of size 2 at least.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Views {
    factors: Vec<Factor>,
    /// The source's mesh.
    mesh: Mesh,
}

/// A digit of the destination's device index that is a digit of the source's: `size` devices, which lie `step` apart
/// among the destination's and `stride` apart among the source's.
struct Digit {
    size: i64,
    step: i64,
    stride: i64,
}

impl Views {
    /// The common sub-axes of `source` and `destination`, where `same` holds, for each destination device, the source
    /// device that it is, or a negative number; `None` if both meshes have the same devices in the same order.
    ///
    /// ```
    /// use shardwise_core::{collective::views::Views, mesh::Mesh};
    /// let world = Mesh::new(&["world"], &[8])?;
    /// let grid = Mesh::new(&["dp", "tp"], &[2, 4])?;
    /// let views = Views::new((&world).into(), (&grid).into(), None)?;
    /// assert_eq!(views.names(&[1]), ["world:(2)4"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The [`Obstacle`], if there are none.
    pub fn new(source: Side<'_>, destination: Side<'_>, same: Option<&[i64]>) -> Result<Self, Obstacle> {
        let n = source.mesh.size();
        if n != destination.mesh.size() {
            return Err(Obstacle::DeviceCount { source_size: n, destination_size: destination.mesh.size() });
        }
        let digits = match same {
            _ if n == 1 => Vec::new(),
            None => vec![Digit { size: n, step: 1, stride: 1 }],
            Some(same) => digits(same)?,
        };
        let apart = || Obstacle::NoCommonSubAxes {
            source_shape: source.mesh.sizes().to_vec(),
            destination_shape: destination.mesh.sizes().to_vec(),
        };
        let mut cuts: Vec<i64> = [source.mesh.strides(), source.refined.strides()].concat();
        cuts.extend(digits.iter().flat_map(|digit| [digit.stride, digit.stride * digit.size]));
        cuts.push(n);
        let steps = destination.mesh.strides().iter().chain(destination.refined.strides());
        for &step in steps.filter(|&&step| step < n) {
            let digit = digits.iter().find(|digit| digit.step <= step && step < digit.step * digit.size);
            let digit = digit.filter(|digit| step % digit.step == 0).ok_or_else(apart)?;
            cuts.push(digit.stride * (step / digit.step));
        }
        short::sort_by_key(&mut cuts, |&cut| std::cmp::Reverse(cut));
        cuts.dedup();
        let mut factors = Vec::with_capacity(cuts.len());
        for pair in cuts.windows(2) {
            let (above, stride) = (pair[0], pair[1]);
            if above % stride != 0 {
                return Err(apart());
            }
            let digit = digits.iter().find(|digit| digit.stride <= stride && above <= digit.stride * digit.size);
            let digit = digit.ok_or_else(apart)?;
            let step = |cut: i64| digit.step * (cut / digit.stride);
            let sub_axis = sub_axis(source.mesh, above, stride).ok_or_else(apart)?;
            let there = self::sub_axis(destination.mesh, step(above), step(stride)).ok_or_else(apart)?;
            factors.push(Factor { sub_axis, destination_axis: there.axis, stride, step: step(stride) });
        }
        Ok(Self { factors, mesh: source.mesh.clone() })
    }

    /// The same with every factor cut into its prime factors, the larger ones major or minor.
    #[must_use]
    pub fn primes(&self, larger_major: bool) -> Self {
        let mut factors = Vec::new();
        for factor in &self.factors {
            let SubAxis { axis, mut before, size: mut rest } = factor.sub_axis;
            let mut primes = prime_factors(rest);
            if larger_major {
                primes.reverse();
            }
            for size in primes {
                rest /= size;
                let sub_axis = SubAxis { axis, before, size };
                let (stride, step) = (factor.stride * rest, factor.step * rest);
                factors.push(Factor { sub_axis, stride, step, ..*factor });
                before *= size;
            }
        }
        Self { factors, mesh: self.mesh.clone() }
    }

    /// The factors.
    #[must_use]
    pub fn factors(&self) -> &[Factor] {
        &self.factors
    }

    /// The sizes of the factors.
    #[must_use]
    pub fn sizes(&self) -> Vec<i64> {
        self.factors.iter().map(|factor| factor.sub_axis.size).collect()
    }

    /// The distance of neighbours along a factor on their axis of the source's mesh.
    #[must_use]
    pub fn hops(&self, factor: usize) -> i64 {
        let SubAxis { axis, before, size } = self.factors[factor].sub_axis;
        self.mesh.sizes()[axis] / (before * size)
    }

    /// The factors by which a layout on the source's mesh cuts each dim, and those over which it is unreduced.
    #[must_use]
    pub fn of_source(&self, layout: &Layout) -> (Vec<Vec<usize>>, Vec<usize>) {
        self.of(layout, |factor| factor.stride)
    }

    /// The same of a layout on the destination's mesh.
    #[must_use]
    pub fn of_destination(&self, layout: &Layout) -> (Vec<Vec<usize>>, Vec<usize>) {
        self.of(layout, |factor| factor.step)
    }

    fn of(&self, layout: &Layout, stride: impl Fn(&Factor) -> i64) -> (Vec<Vec<usize>>, Vec<usize>) {
        let mesh = layout.mesh();
        let parts = |axis: usize| {
            let (from, size) = (mesh.strides()[axis], mesh.sizes()[axis]);
            // At most the number of devices.
            let within = |factor: &Factor| from <= stride(factor) && stride(factor) < from * size;
            let mut parts: Vec<usize> = (0..self.factors.len()).filter(|&i| within(&self.factors[i])).collect();
            short::sort_by_key(&mut parts, |&i| std::cmp::Reverse(stride(&self.factors[i])));
            parts
        };
        let all = |axes: &[usize]| axes.iter().flat_map(|&axis| parts(axis)).collect::<Vec<_>>();
        let mut unreduced = all(&layout.unreduced_axes());
        unreduced.sort_unstable();
        (layout.specs().iter().map(|spec| all(spec)).collect(), unreduced)
    }

    /// The factors that make up a sub-axis of the source's mesh.
    #[must_use]
    pub fn within(&self, wanted: SubAxis) -> Vec<usize> {
        let end = wanted.before * wanted.size;
        let held = |factor: &Factor| {
            let SubAxis { axis, before, .. } = factor.sub_axis;
            axis == wanted.axis && wanted.before <= before && before < end
        };
        (0..self.factors.len()).filter(|&i| held(&self.factors[i])).collect()
    }

    /// Factors by their names in the source's mesh; neighbours that are one axis, or one sub-axis, are named as one.
    #[must_use]
    pub fn names(&self, factors: &[usize]) -> Vec<String> {
        let mut joined: Vec<SubAxis> = Vec::with_capacity(factors.len());
        for &factor in factors {
            let next = self.factors[factor].sub_axis;
            match joined.last_mut() {
                Some(last) if last.axis == next.axis && last.before * last.size == next.before => {
                    last.size *= next.size
                }
                _ => joined.push(next),
            }
        }
        let name = |SubAxis { axis, before, size }| {
            let name = &self.mesh.names()[axis];
            if size == self.mesh.sizes()[axis] { name.clone() } else { sub_axis::text(name, before, size) }
        };
        joined.into_iter().map(name).collect()
    }
}

/// The sub-axis of `mesh` whose neighbours lie `stride` apart and that begins anew every `above` devices.
fn sub_axis(mesh: &Mesh, above: i64, stride: i64) -> Option<SubAxis> {
    let mut axes = mesh.strides().iter().zip(mesh.sizes()).enumerate();
    axes.find_map(|(axis, (&from, &size))| {
        // At most the number of devices.
        let end = from * size;
        let within = from <= stride && above <= end && stride % from == 0 && end % above == 0;
        within.then(|| SubAxis { axis, before: end / above, size: above / stride })
    })
}

/// The digits by which the destination's device index is the source's, minor first.
fn digits(same: &[i64]) -> Result<Vec<Digit>, Obstacle> {
    if let Some(position) = same.iter().position(|&device| device < 0) {
        return Err(Obstacle::Devices { position });
    }
    let (n, mut digits, mut step) = (same.len(), Vec::new(), 1);
    if same[0] != 0 {
        return Err(Obstacle::DeviceOrder);
    }
    while step < n {
        let stride = same[step];
        if stride < 1 {
            return Err(Obstacle::DeviceOrder);
        }
        let multiple = |k: usize| same.get(k * step) == stride.checked_mul(k as i64).as_ref();
        let size = (2..).find(|&k| !multiple(k)).unwrap_or(n);
        // What has been found must repeat itself at every multiple.
        let repeats =
            |k: usize| (0..step).all(|i| same[k * step + i].checked_sub(same[i]) == stride.checked_mul(k as i64));
        if n % (step * size) != 0 || !(1..size).all(repeats) {
            return Err(Obstacle::DeviceOrder);
        }
        digits.push(Digit { size: size as i64, step: step as i64, stride });
        step *= size;
    }
    let mut by_stride: Vec<(i64, i64)> = digits.iter().map(|digit| (digit.stride, digit.size)).collect();
    short::sort_by_key(&mut by_stride, |&digit| digit);
    let mut expected = 1;
    for (stride, size) in by_stride {
        if stride != expected {
            return Err(Obstacle::DeviceOrder);
        }
        expected *= size;
    }
    Ok(digits)
}

/// The largest divisor that prime factors are looked for by; what then remains counts as one.
const LARGEST_DIVISOR: i64 = 1 << 16;

/// The prime factors of `n`, the smallest first.
pub(super) fn prime_factors(mut n: i64) -> Vec<i64> {
    let (mut factors, mut divisor) = (Vec::new(), 2);
    while divisor <= (n / divisor).min(LARGEST_DIVISOR) {
        while n % divisor == 0 {
            factors.push(divisor);
            n /= divisor;
        }
        divisor += 1;
    }
    if n > 1 {
        factors.push(n);
    }
    factors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::radix;

    fn mesh(sizes: &[i64]) -> Mesh {
        let names: Vec<String> = (0..sizes.len()).map(|axis| format!("a{axis}")).collect();
        Mesh::new(&names, sizes).unwrap()
    }

    fn views(source: &Mesh, destination: &Mesh, same: Option<&[i64]>) -> Result<Views, Obstacle> {
        Views::new(source.into(), destination.into(), same)
    }

    fn sizes(source: &[i64], destination: &[i64]) -> Result<Vec<i64>, Obstacle> {
        views(&mesh(source), &mesh(destination), None).map(|views| views.sizes())
    }

    #[test]
    fn the_strides_of_both_are_one_chain() {
        assert_eq!(sizes(&[8], &[2, 4]), Ok(vec![2, 4]));
        assert_eq!(sizes(&[2, 4], &[4, 2]), Ok(vec![2, 2, 2]));
        assert_eq!(sizes(&[2, 1, 3], &[6]), Ok(vec![2, 3]));
        assert_eq!(sizes(&[12, 2], &[2, 2, 6]), Ok(vec![2, 2, 3, 2]));
        assert_eq!(sizes(&[1, 1], &[1]), Ok(vec![]));
        assert!(matches!(sizes(&[6, 4], &[4, 6]), Err(Obstacle::NoCommonSubAxes { .. })));
        let other_size = Obstacle::DeviceCount { source_size: 8, destination_size: 4 };
        assert_eq!(sizes(&[8], &[4]), Err(other_size));
        let large = i64::MAX / 2 + 1;
        assert_eq!(sizes(&[large], &[2, large / 2]), Ok(vec![2, large / 2]));
    }

    #[test]
    fn every_factor_is_the_same_digit_of_both_device_indices() {
        // Transpositions of (2, 3, 4), whose axes are then joined or cut in two.
        let source = mesh(&[2, 3, 4]);
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let turned: Vec<i64> = order.iter().map(|&axis| source.sizes()[axis]).collect();
            let device = |index: i64| {
                let digits = radix::unravel(index, &turned);
                order.iter().zip(digits).map(|(&axis, digit)| digit * source.strides()[axis]).sum::<i64>()
            };
            let same: Vec<i64> = (0..24).map(device).collect();
            let joined = [turned[0] * turned[1], turned[2]];
            let cut: Vec<i64> = turned.iter().flat_map(|&n| if n == 4 { vec![2, 2] } else { vec![n] }).collect();
            for shape in [&turned[..], &joined, &cut] {
                let destination = mesh(shape);
                let views = views(&source, &destination, Some(&same)).unwrap();
                for views in [views.primes(true), views.primes(false), views] {
                    assert_eq!(views.sizes().iter().product::<i64>(), 24);
                    for (index, &there) in same.iter().enumerate() {
                        for factor in views.factors() {
                            let SubAxis { axis, before, size } = factor.sub_axis;
                            let rest = source.sizes()[axis] / (before * size);
                            let by_rule = source.coordinate(there).unwrap()[axis] / rest % size;
                            assert_eq!(there / factor.stride % size, by_rule, "{order:?} {shape:?} {factor:?}");
                            assert_eq!(index as i64 / factor.step % size, by_rule, "{order:?} {shape:?} {factor:?}");
                            let (from, size) = (destination.strides(), destination.sizes());
                            let axis = factor.destination_axis;
                            assert!(from[axis] <= factor.step && factor.step < from[axis] * size[axis]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn other_orders_have_none() {
        let (grid, line) = (mesh(&[2, 2]), mesh(&[4]));
        for same in [[3, 2, 1, 0], [0, 1, 3, 2], [1, 0, 3, 2], [0, 3, 1, 2], [0, 0, 0, 0], [0, 1, 1, 2]] {
            assert_eq!(views(&grid, &line, Some(&same)), Err(Obstacle::DeviceOrder), "{same:?}");
        }
        let missing = views(&grid, &line, Some(&[0, 1, -1, 3]));
        assert_eq!(missing, Err(Obstacle::Devices { position: 2 }));
        assert!(views(&grid, &line, Some(&[0, 2, 1, 3])).is_ok());
    }

    #[test]
    fn neighbours_are_written_as_one() {
        let views = views(&mesh(&[8, 3]), &mesh(&[2, 2, 6]), None).unwrap().primes(true);
        assert_eq!(views.sizes(), [2, 2, 2, 3]);
        assert_eq!(views.names(&[0, 1, 2]), ["a0"]);
        assert_eq!(views.names(&[1, 2, 3]), ["a0:(2)4", "a1"]);
        assert_eq!(views.names(&[1, 0]), ["a0:(2)2", "a0:(1)2"]);
        assert_eq!(views.within(SubAxis { axis: 0, before: 2, size: 4 }), [1, 2]);
        assert_eq!([0, 1, 2, 3].map(|factor| views.hops(factor)), [4, 2, 1, 1]);
    }

    #[test]
    fn a_number_is_the_product_of_its_prime_factors() {
        assert_eq!(prime_factors(1), Vec::<i64>::new());
        assert_eq!(prime_factors(360), [2, 2, 2, 3, 3, 5]);
        assert_eq!(prime_factors(97), [97]);
        assert_eq!(prime_factors((1 << 61) - 1), [(1 << 61) - 1]);
    }
}
