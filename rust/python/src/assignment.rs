//! `_core.least_assignments`.

use pyo3::{exceptions::PyValueError, prelude::*};
use shardwise_core::assignment::least;

use crate::{arrays, convert::Numbers, errors::answer};

/// The column of each row in each of some square matrices of costs, one after the other in a flat array.
#[pyfunction]
#[pyo3(signature = (costs, size, /))]
pub(crate) fn least_assignments<'py>(
    py: Python<'py>,
    costs: &Bound<'py, PyAny>,
    size: usize,
) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        let costs = Numbers::new("costs", costs)?;
        let costs = costs.slice()?;
        let wrong = || PyValueError::new_err(format!("costs are not those of matrices of {size} rows and columns"));
        let cells = size.checked_mul(size).filter(|&cells| cells > 0).ok_or_else(wrong)?;
        let found: Option<Vec<Vec<usize>>> = costs.chunks(cells).map(|matrix| least(matrix, size)).collect();
        let found = found.ok_or_else(wrong)?.concat();
        arrays::filled(py, &[found.len() / size, size], |out, _| {
            for (to, column) in out.iter_mut().zip(found) {
                *to = column as i64;
            }
            Ok(())
        })
    })
}
