//! The mesh.

use std::sync::{Arc, OnceLock};

use numpy::{PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyInt, PyList, PyString},
};
use shardwise_core::{
    dtensor::{DeviceList, Ids, Mesh, MeshParts},
    error::Error as CoreError,
};

use super::{CoreResult, hash_of, outside, parsed_text, room_to_read, room_to_write, text};
use crate::{
    arrays::{filled, length, list},
    convert::{integer, integers, strings},
    errors::{answer, guard, to_py},
    memory::room,
};

/// The Rust half of `shardwise.dtensor.Mesh`.
#[pyclass(frozen, module = "shardwise._core")]
pub(crate) struct DtensorMesh {
    pub(super) mesh: Arc<Mesh>,
    hash: OnceLock<u64>,
}

impl DtensorMesh {
    pub(super) fn of(mesh: Arc<Mesh>) -> Self {
        Self { mesh, hash: OnceLock::new() }
    }

    fn made(mesh: CoreResult<Mesh>) -> PyResult<Self> {
        Ok(Self::of(Arc::new(mesh.map_err(to_py)?)))
    }

    /// The names of all devices, if they were given.
    fn all_devices(&self) -> Option<&DeviceList> {
        self.mesh.tiled().map(|tiled| tiled.global_devices())
    }
}

#[pymethods]
impl DtensorMesh {
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "TensorFlow's constructor has as many")]
    fn new(
        dim_names: &Bound<'_, PyAny>,
        shape: &Bound<'_, PyAny>,
        global_ids: PyReadonlyArray1<'_, i64>,
        local_ids: &Bound<'_, PyAny>,
        local_devices: &Bound<'_, PyList>,
        name: &Bound<'_, PyAny>,
        global_devices: &Bound<'_, PyList>,
        use_xla_spmd: bool,
    ) -> PyResult<Self> {
        guard(|| {
            let mut ids = Ids::default();
            room("the mesh", (global_ids.len() + local_devices.len() + global_devices.len()).saturating_mul(64))?;
            let given = global_ids.as_slice().map_err(|error| PyTypeError::new_err(error.to_string()))?;
            ids.extend(given.iter().copied());
            Self::made(Mesh::new(MeshParts {
                name: text("mesh_name", name)?.to_owned(),
                dim_names: strings("dim_names", dim_names)?,
                shape: integers("shape", shape)?,
                global_ids: ids,
                local_ids: integers("local_device_ids", local_ids)?,
                local_devices: device_list("local_devices", local_devices)?,
                global_devices: device_list("global_devices", global_devices)?,
                use_xla_spmd,
            }))
        })
    }

    #[staticmethod]
    fn from_device(device: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| Self::made(Mesh::from_device(text("device", device)?)))
    }

    #[staticmethod]
    fn from_text(text: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(|| Self::made(Mesh::from_text(parsed_text("mesh text", text)?)))
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        guard(|| {
            room_to_read("the message", data.len())?;
            Self::made(Mesh::from_bytes(data))
        })
    }

    fn to_text<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            room_to_write(&self.mesh)?;
            Ok(self.mesh.to_text())
        })
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        guard(|| {
            room_to_write(&self.mesh)?;
            Ok(PyBytes::new(py, &self.mesh.to_bytes()))
        })
    }

    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.name()))
    }

    #[getter]
    fn dim_names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.dim_names().iter().map(String::as_str).collect::<Vec<_>>()))
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.shape().to_vec()))
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.strides().to_vec()))
    }

    #[getter]
    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.size()))
    }

    #[getter]
    fn use_xla_spmd(&self) -> PyResult<bool> {
        guard(|| Ok(self.mesh.use_xla_spmd()))
    }

    #[getter]
    fn device_type<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.device_type()))
    }

    #[getter]
    fn single_device<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(if let Mesh::SingleDevice(device) = &*self.mesh { Some(device.as_str()) } else { None }))
    }

    #[getter]
    fn first_global_id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.global_ids().start))
    }

    #[getter]
    fn num_local_devices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || Ok(self.mesh.local_ids().len()))
    }

    fn local_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guard(|| PyList::new(py, self.mesh.local_ids()))
    }

    fn local_devices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guard(|| names(py, self.mesh.local_devices()))
    }

    fn global_devices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guard(|| names(py, self.all_devices()))
    }

    fn host_mesh(&self) -> PyResult<Self> {
        guard(|| {
            room_to_write(&self.mesh)?;
            Self::made(self.mesh.host_mesh())
        })
    }

    fn device_location<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        answer(py, || {
            let value = integer("device_id", index).map_err(outside("device_id"))?;
            match self.mesh.tiled() {
                Some(tiled) => tiled.axes().coordinate(value).map_err(to_py),
                None => Err(to_py(CoreError::OutOfRange { what: "device_id", position: None, value, limit: 0 })),
            }
        })
    }

    fn coords<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let index = integer("device_idx", index).map_err(outside("device_idx"))?;
            filled(py, &[self.mesh.shape().len()], |out, _| {
                self.mesh.wrapped_coordinate(index, out);
                Ok(())
            })
        })
    }

    fn coords_of<'py>(&self, py: Python<'py>, indices: PyReadonlyArray1<'py, i64>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let rank = self.mesh.shape().len();
            let given = indices.as_slice().map_err(|error| PyTypeError::new_err(error.to_string()))?;
            filled(py, &[given.len().saturating_mul(rank)], |out, _| {
                for (&index, row) in given.iter().zip(out.chunks_mut(rank.max(1))) {
                    self.mesh.wrapped_coordinate(index, row);
                }
                Ok(())
            })
        })
    }

    fn coordinates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guard(|| match self.mesh.tiled() {
            Some(tiled) => {
                let shape = [length("devices", self.mesh.size())?, self.mesh.shape().len()];
                filled(py, &shape, |out, poll| tiled.axes().coordinates_into(out, poll))
            }
            None => filled(py, &[0, 0], |_, _| Ok(())),
        })
    }

    fn unravel_index<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        guard(|| {
            let by_id = PyDict::new(py);
            let mut locations = Locations::new(py, &self.mesh)?;
            for (index, id) in self.mesh.global_ids().enumerate() {
                by_id.set_item(id, locations.of(index as i64)?)?;
            }
            Ok(by_id)
        })
    }

    fn local_device_locations<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guard(|| {
            let first = self.mesh.global_ids().start;
            let mut locations = Locations::new(py, &self.mesh)?;
            let of_each = self.mesh.local_ids().iter().map(|&id| locations.of(id - first));
            let mut all = list("devices", of_each.len())?;
            for location in of_each {
                all.push(location?);
            }
            PyList::new(py, all)
        })
    }

    fn __eq__(&self, other: &Self) -> PyResult<bool> {
        guard(|| Ok(Arc::ptr_eq(&self.mesh, &other.mesh) || self.mesh == other.mesh))
    }

    fn __hash__(&self) -> PyResult<u64> {
        guard(|| Ok(*self.hash.get_or_init(|| hash_of(&*self.mesh))))
    }
}

/// Makes the dicts from axis name to position of many devices: each is a copy of the one before, with what changed.
struct Locations<'py> {
    names: Vec<Bound<'py, PyString>>,
    numbers: Vec<Bound<'py, PyInt>>,
    mesh: Arc<Mesh>,
    digits: Vec<i64>,
    last: Bound<'py, PyDict>,
}

impl<'py> Locations<'py> {
    fn new(py: Python<'py>, mesh: &Arc<Mesh>) -> PyResult<Self> {
        let names: Vec<_> = mesh.dim_names().iter().map(|name| PyString::intern(py, name)).collect();
        let longest = mesh.shape().iter().copied().max().unwrap_or(0);
        let numbers = numbers(py, longest)?;
        let last = PyDict::new(py);
        for name in &names {
            last.set_item(name, &numbers[0])?;
        }
        Ok(Self { digits: vec![0; names.len()], names, numbers, mesh: Arc::clone(mesh), last })
    }

    fn of(&mut self, index: i64) -> PyResult<Bound<'py, PyDict>> {
        let location = self.last.copy()?;
        let mut rest = index;
        for axis in (0..self.names.len()).rev() {
            let size = self.mesh.shape()[axis];
            let digit = rest % size;
            rest /= size;
            if digit != self.digits[axis] {
                self.digits[axis] = digit;
                location.set_item(&self.names[axis], &self.numbers[digit as usize])?;
            }
        }
        self.last = location.clone();
        Ok(location)
    }
}

/// The numbers below `end` as objects.
pub(super) fn numbers<'py>(py: Python<'py>, end: i64) -> PyResult<Vec<Bound<'py, PyInt>>> {
    let mut numbers = list("numbers", length("numbers", end)?)?;
    for n in 0..end {
        numbers.push(n.into_pyobject(py)?);
    }
    Ok(numbers)
}

fn names<'py>(py: Python<'py>, devices: Option<&DeviceList>) -> PyResult<Bound<'py, PyList>> {
    match devices {
        Some(devices) => PyList::new(py, devices.iter()),
        None => Ok(PyList::empty(py)),
    }
}

/// Device names from strings and from anything with `to_string()`.
fn device_list(what: &str, devices: &Bound<'_, PyList>) -> PyResult<DeviceList> {
    let mut list = DeviceList::with_capacity(devices.len());
    for (position, device) in devices.iter().enumerate() {
        if let Ok(text) = device.cast::<PyString>()
            && let Ok(text) = text.to_str()
        {
            list.push(text);
            continue;
        }
        let what = format!("{what}[{position}]");
        let printed = if device.is_instance_of::<PyString>() { device } else { call_to_string(&what, &device)? };
        list.push(text(&what, &printed)?);
    }
    Ok(list)
}

fn call_to_string<'py>(what: &str, device: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if !device.hasattr("to_string")? {
        let type_name = device.get_type().name()?;
        return Err(PyTypeError::new_err(format!("{what} is a {type_name}; a device is a str or has to_string()")));
    }
    device.call_method0("to_string")
}
