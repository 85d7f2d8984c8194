//! One of the arrays that are checked for common bytes.

use crate::copy::strided::Strided;

/// An array that is not empty, with the lowest address and one past the highest.
pub(super) struct Item<'a> {
    pub(super) low: i128,
    pub(super) high: i128,
    pub(super) written: bool,
    /// Its position among the sources, or among the destinations.
    pub(super) index: usize,
    pub(super) array: &'a Strided,
}

impl<'a> Item<'a> {
    pub(super) fn of(arrays: &'a [Strided], written: bool) -> impl Iterator<Item = Self> {
        arrays.iter().enumerate().filter_map(move |(index, array)| {
            let (low, high) = span(array)?;
            Some(Self { low, high, written, index, array })
        })
    }

    /// The distances of the steps that it makes, which have no sign, for it begins where it is lowest.
    pub(super) fn strides(&self) -> impl Iterator<Item = i128> {
        steps(self.array).map(|(_, stride)| stride)
    }

    /// How many positions it has that lie so far apart; `dims` counts the dims that are found.
    pub(super) fn extent(&self, stride: i128, dims: &mut usize) -> i128 {
        let Some((extent, _)) = steps(self.array).find(|&(_, other)| other == stride) else { return 1 };
        *dims += 1;
        extent
    }

    pub(super) fn itemsize(&self) -> i128 {
        self.array.itemsize() as i128
    }
}

/// Extent and distance of the dims in which an array has more than one item.
fn steps(array: &Strided) -> impl Iterator<Item = (i128, i128)> {
    let dims = array.dims().iter().filter(|&&(extent, stride)| extent > 1 && stride != 0);
    dims.map(|&(extent, stride)| (i128::from(extent), (stride as i128).abs()))
}

/// Two items that share a byte, or may, by their positions.
pub(super) struct Meeting(pub(super) usize, pub(super) usize);

/// The lowest address and one past the highest; none if the region is empty.
pub(super) fn span(region: &Strided) -> Option<(i128, i128)> {
    let (mut low, mut high) = (region.address() as i128, region.address() as i128 + region.itemsize() as i128);
    for &(extent, stride) in region.dims() {
        let reach = i128::from(extent - 1) * stride as i128;
        low += reach.min(0);
        high += reach.max(0);
    }
    (region.dims().iter().all(|&(extent, _)| extent > 0) && region.itemsize() > 0).then_some((low, high))
}
