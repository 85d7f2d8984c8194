//! Messages, as tuples of their fields.

use pyo3::{
    exceptions::PyOverflowError,
    prelude::*,
    types::{PyBytes, PyList},
};
use shardwise_core::dtensor::{DeviceList, LayoutMessage, MeshMessage};

use super::room_to_read;
use crate::{
    convert::{integer, strings},
    errors::{SizeOverflowError, answer, guard, to_py},
    memory::room,
};

/// The fields of a `MeshProto`, as Python passes them.
type MeshFields = (Vec<(String, i64)>, Vec<i64>, String, Vec<i64>, Vec<String>, Vec<String>, bool, String);

/// Writes a `MeshProto`.
#[pyfunction]
pub(crate) fn encode_mesh<'py>(py: Python<'py>, fields: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    guard(|| Ok(PyBytes::new(py, &mesh_message(extracted(fields)?).encode())))
}

/// Reads a `MeshProto`.
#[pyfunction]
pub(crate) fn decode_mesh<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        room_to_read("the message", data.len())?;
        Ok(mesh_fields(MeshMessage::decode(data).map_err(to_py)?))
    })
}

/// Writes a `LayoutProto`.
#[pyfunction]
pub(crate) fn encode_layout<'py>(
    py: Python<'py>,
    sharding_specs: &Bound<'py, PyAny>,
    mesh_config: Option<&Bound<'py, PyAny>>,
    layout_type: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    guard(|| {
        let number = integer("type", layout_type)?;
        let too_large = |_| SizeOverflowError::new_err(format!("type is {number}, outside the 32-bit range"));
        let layout_type = i32::try_from(number).map_err(too_large)?;
        let sharding_specs = strings("sharding_specs", sharding_specs)?;
        let mesh_config = mesh_config.map(extracted).transpose()?;
        let message = LayoutMessage { sharding_specs, mesh_config: mesh_config.map(mesh_message), layout_type };
        Ok(PyBytes::new(py, &message.encode()))
    })
}

/// Reads a `LayoutProto`.
#[pyfunction]
pub(crate) fn decode_layout<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    answer(py, || {
        room_to_read("the message", data.len())?;
        let message = LayoutMessage::decode(data).map_err(to_py)?;
        Ok((message.sharding_specs, message.mesh_config.map(mesh_fields), message.layout_type))
    })
}

/// The fields of a message; asks for their memory first.
fn extracted(fields: &Bound<'_, PyAny>) -> PyResult<MeshFields> {
    let mut bytes = 0_usize;
    for field in fields.try_iter()? {
        let field = field?;
        let Ok(list) = field.cast::<PyList>() else { continue };
        bytes = bytes.saturating_add(list.len().saturating_mul(100));
        for entry in list {
            bytes = bytes.saturating_add(entry.len().unwrap_or(0).saturating_mul(4));
        }
    }
    room("the message", bytes)?;
    fields.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(fields.py()) {
            return SizeOverflowError::new_err("a number of the message is outside the 64-bit range");
        }
        error
    })
}

fn mesh_message(fields: MeshFields) -> MeshMessage {
    let (mesh_dimensions, global_device_ids, name, local_device_ids, local, global, use_xla_spmd, single_device) =
        fields;
    let list = |devices: Vec<String>| {
        let mut list = DeviceList::with_capacity(devices.len());
        devices.iter().for_each(|device| list.push(device));
        list
    };
    MeshMessage {
        mesh_dimensions,
        global_device_ids,
        name,
        local_device_ids,
        local_devices: list(local),
        global_devices: list(global),
        use_xla_spmd,
        single_device,
    }
}

fn mesh_fields(message: MeshMessage) -> MeshFields {
    let list = |devices: DeviceList| devices.iter().map(str::to_owned).collect();
    (
        message.mesh_dimensions,
        message.global_device_ids,
        message.name,
        message.local_device_ids,
        list(message.local_devices),
        list(message.global_devices),
        message.use_xla_spmd,
        message.single_device,
    )
}
