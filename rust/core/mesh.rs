//! A mesh: named axes with sizes, and one device per position, row-major (rule 2.1).

use std::collections::HashMap;

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    parallel::{self, Poll},
    radix,
};

/// Named axes with sizes. The devices are known by their row-major index; what they are called is the caller's affair.
///
/// ```
/// use shardwise_core::mesh::Mesh;
/// let mesh = Mesh::new(&["data", "model"], &[2, 4])?;
/// assert_eq!((mesh.size(), mesh.strides()), (8, &[4, 1][..]));
/// assert_eq!(mesh.coordinate(6)?, [1, 2]);
/// assert_eq!(mesh.device_index(&[1, 2])?, 6);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mesh {
    names: Vec<String>,
    /// The positions of the axes in the order of their names, to find one among many.
    by_name: Vec<usize>,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    size: i64,
}

impl Mesh {
    /// A mesh of the axes `names` with `sizes`.
    ///
    /// # Errors
    /// No axes; names and sizes that do not pair up; an empty or repeated name; a size below 1; more than 2^63 - 1
    /// devices.
    pub fn new<S: AsRef<str>>(names: &[S], sizes: &[i64]) -> Result<Self> {
        if names.len() != sizes.len() {
            return Err(Error::AxisCount { names: names.len(), sizes: sizes.len() });
        }
        if names.is_empty() {
            return Err(Error::NoAxes);
        }
        let mut seen = HashMap::with_capacity(names.len());
        for (axis, (name, &size)) in names.iter().zip(sizes).enumerate() {
            let name = name.as_ref();
            if name.is_empty() {
                return Err(Error::EmptyAxisName { axis });
            }
            if let Some(first) = seen.insert(name, axis) {
                return Err(Error::DuplicateAxisName { name: name.to_owned(), first, second: axis });
            }
            if size < 1 {
                return Err(Error::AxisSize { axis, name: name.to_owned(), size });
            }
        }
        let names = names.iter().map(|name| name.as_ref().to_owned()).collect();
        Ok(Self::refined(names, sizes.to_vec(), radix::product("shape", sizes)?))
    }

    /// A mesh that is known to be one: the axes of another one of `size` devices, factored. Its names may be equal to
    /// those of other axes, so it is not asked for axes by name.
    pub(crate) fn refined(names: Vec<String>, sizes: Vec<i64>, size: i64) -> Self {
        let mut by_name: Vec<usize> = (0..names.len()).collect();
        by_name.sort_unstable_by_key(|&axis| names[axis].as_str());
        Self { by_name, strides: radix::strides(&sizes), sizes, names, size }
    }

    /// The axis names, major first.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The axis sizes.
    #[must_use]
    pub fn sizes(&self) -> &[i64] {
        &self.sizes
    }

    /// The stride of each axis: the growth of the device index with the axis's coordinate.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.strides
    }

    /// The number of devices.
    #[must_use]
    pub fn size(&self) -> i64 {
        self.size
    }

    /// The position of the axis called `name`.
    #[must_use]
    pub fn axis(&self, name: &str) -> Option<usize> {
        let found = self.by_name.binary_search_by(|&axis| self.names[axis].as_str().cmp(name)).ok()?;
        Some(self.by_name[found])
    }

    /// The coordinate of device `index`: `(index // strides) % sizes`.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn coordinate(&self, index: i64) -> Result<Vec<i64>> {
        self.check(index)?;
        Ok(radix::unravel(index, &self.sizes))
    }

    /// The device index at `coordinate`.
    ///
    /// # Errors
    /// [`Error::CoordinateRank`] or [`Error::Coordinate`] if the mesh has no such position.
    pub fn device_index(&self, coordinate: &[i64]) -> Result<i64> {
        if coordinate.len() != self.sizes.len() {
            return Err(Error::CoordinateRank { given: coordinate.len(), axes: self.sizes.len() });
        }
        let mut index = 0;
        for (axis, (&given, &size)) in coordinate.iter().zip(&self.sizes).enumerate() {
            if given < 0 || given >= size {
                return Err(Error::Coordinate { axis, name: self.names[axis].clone(), given, size });
            }
            index += given * self.strides[axis];
        }
        Ok(index)
    }

    /// Fills `out`, of (devices, axes) in C order, with the coordinates of all devices.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements; what `poll` returns.
    #[inline(never)]
    pub fn coordinates_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let axes = self.sizes.len();
        let expected = usize::try_from(self.size).ok().and_then(|n| n.checked_mul(axes));
        if expected != Some(out.len()) {
            return Err(Error::Length {
                left: "out",
                left_len: out.len(),
                right: "coordinates",
                right_len: expected.unwrap_or(usize::MAX),
            });
        }
        let columns: Vec<Linear> = (0..axes).map(|axis| Linear::new(&self.sizes, |a| i64::from(a == axis))).collect();
        let devices_per_piece = (parallel::PIECE / axes).max(1);
        let pieces = out.chunks_mut(devices_per_piece * axes).enumerate();
        parallel::for_each(self.size as usize * axes, pieces, poll, |(number, piece)| {
            let start = (number * devices_per_piece) as i64;
            match axes {
                2 => fill_rows::<2>(&self.sizes, start, piece),
                3 => fill_rows::<3>(&self.sizes, start, piece),
                _ => columns.iter().enumerate().for_each(|(axis, column)| column.fill(start, piece, axis, axes)),
            }
            Ok(())
        })
    }

    /// `index` itself, if the mesh has such a device.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if it has not.
    pub fn check(&self, index: i64) -> Result<i64> {
        if index < 0 || index >= self.size {
            return Err(Error::DeviceIndex { index, size: self.size });
        }
        Ok(index)
    }
}

/// Fills `out` with the coordinates of the devices from `start` on, in a mesh of `N` axes. Row by row, which for few axes
/// is faster than column by column.
fn fill_rows<const N: usize>(sizes: &[i64], start: i64, out: &mut [i64]) {
    let mut row = [0; N];
    row.copy_from_slice(&radix::unravel(start, sizes));
    let (mut rows, _) = out.as_chunks_mut::<N>();
    while !rows.is_empty() {
        let mut last = row[N - 1];
        let count = usize::try_from(sizes[N - 1] - last).unwrap_or(usize::MAX).min(rows.len());
        let (run, rest) = rows.split_at_mut(count);
        for out in run {
            out[..N - 1].copy_from_slice(&row[..N - 1]);
            out[N - 1] = last;
            // The step past the end is never stored.
            last = last.wrapping_add(1);
        }
        (rows, row[N - 1]) = (rest, 0);
        for (digit, &size) in row.iter_mut().zip(sizes).rev().skip(1) {
            *digit += 1;
            if *digit < size {
                break;
            }
            *digit = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_index_comes_back_from_its_coordinate() {
        let mesh = Mesh::new(&["x", "y", "z"], &[2, 3, 4]).unwrap();
        assert_eq!(mesh.device_index(&[1, 2, 3]), Ok(23));
        for device in 0..24 {
            assert_eq!(mesh.device_index(&mesh.coordinate(device).unwrap()), Ok(device));
        }
    }

    #[test]
    fn a_coordinate_that_the_mesh_has_not_is_refused() {
        let mesh = Mesh::new(&["x", "y"], &[2, 3]).unwrap();
        for (coordinate, axis, name, size) in [([-1, 0], 0, "x", 2), ([2, 0], 0, "x", 2), ([0, 3], 1, "y", 3)] {
            let given = coordinate[axis];
            let refused = Error::Coordinate { axis, name: name.to_owned(), given, size };
            assert_eq!(mesh.device_index(&coordinate), Err(refused));
        }
        assert_eq!(mesh.device_index(&[0]), Err(Error::CoordinateRank { given: 1, axes: 2 }));
        for index in [-1, 6] {
            assert_eq!(mesh.coordinate(index), Err(Error::DeviceIndex { index, size: 6 }));
        }
    }

    #[test]
    fn all_coordinates_are_those_of_each_device() {
        // Some pieces of the work, the last of them not full.
        for sizes in [&[55_000][..], &[50, 1100], &[1, 55_000], &[5, 1000, 11], &[5, 10, 100, 11]] {
            let names: Vec<_> = (0..sizes.len()).map(|axis| axis.to_string()).collect();
            let mesh = Mesh::new(&names, sizes).unwrap();
            let mut all = vec![-1; sizes.len() * 55_000];
            mesh.coordinates_into(&mut all, &mut parallel::never).unwrap();
            for (device, coordinate) in all.chunks(sizes.len()).enumerate() {
                assert_eq!(coordinate, radix::unravel(device as i64, sizes));
            }
        }
        let mesh = Mesh::new(&["x", "y", "z"], &[5, 1000, 11]).unwrap();
        let mut all = vec![-1; 3 * 55_000];
        for len in [0, 3 * 55_000 - 1] {
            let refused = Error::Length { left: "out", left_len: len, right: "coordinates", right_len: 3 * 55_000 };
            assert_eq!(mesh.coordinates_into(&mut all[..len], &mut parallel::never), Err(refused));
        }
    }
}
