//! A strided array in memory, as an address with a shape.

/// A strided array of items in memory.
#[derive(Debug, Clone)]
pub struct Strided {
    data: *mut u8,
    itemsize: usize,
    /// Extent, and stride in bytes.
    dims: Vec<(i64, isize)>,
}

// SAFETY: a strided array is an address with a shape; what is done with it is argued in `kernel`.
unsafe impl Send for Strided {}
// SAFETY: as above.
unsafe impl Sync for Strided {}

impl Strided {
    /// The items of `itemsize` bytes at `data`, with an extent and a stride in bytes for each dim.
    ///
    /// # Safety
    /// Every item that the extents and strides span must be valid for reads, and for writes if it is used as a
    /// destination, as long as it is used.
    #[must_use]
    pub unsafe fn new(data: *mut u8, itemsize: usize, dims: Vec<(i64, isize)>) -> Self {
        Self { data, itemsize, dims }
    }

    /// The items from `offset` on of an array of one dim, as a C-order array of `extents`; `None` if they are not all
    /// within it.
    #[must_use]
    pub fn shaped(&self, offset: i64, extents: &[i64]) -> Option<Self> {
        let &[(length, stride)] = &self.dims[..] else { return None };
        let items = crate::index::radix::product("extents", extents).ok()?;
        if offset < 0 || extents.iter().any(|&n| n < 0) || offset.checked_add(items)? > length {
            return None;
        }
        // Every index is that of an item of this array, so that what is promised for it holds for the new one.
        let strides = crate::index::radix::strides(extents);
        let dims = extents.iter().zip(strides).map(|(&n, step)| (n, stride.wrapping_mul(step as isize))).collect();
        let start = (offset as isize).wrapping_mul(stride);
        Some(Self { data: if items > 0 { self.data.wrapping_offset(start) } else { self.data }, dims, ..self.clone() })
    }

    /// The bytes of all items.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        let extents = self.dims.iter().map(|dim| dim.0);
        extents.fold(self.itemsize as i64, i64::saturating_mul)
    }

    /// Where the first item is.
    pub(super) fn data(&self) -> *mut u8 {
        self.data
    }

    /// The address of the first item.
    #[must_use]
    pub fn address(&self) -> usize {
        self.data.addr()
    }

    /// The bytes of an item.
    #[must_use]
    pub fn itemsize(&self) -> usize {
        self.itemsize
    }

    /// Extent, and stride in bytes, of each dim.
    #[must_use]
    pub fn dims(&self) -> &[(i64, isize)] {
        &self.dims
    }
}
