/* The functions of python.py, compiled: what they mean is written there, and only there.
 *
 * What makes this faster than the interpreter: the getters of confluent-kafka's Message and its `produce` are called
 * without the interpreter between, and the fields of Record and Out are read and filled at their place in the object.
 * All of it is looked up or tried out: what is of another kind takes the way by name.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* What a Message is asked for; Record and Out have fields of these names, Record in this order up to HEADERS. */
enum name { TOPIC, PARTITION, OFFSET, TIMESTAMP, KEY, VALUE, HEADERS, ERROR, NAMES };
enum { FIELDS = HEADERS + 1 }; /* of a Record */
enum { OUT_FIELDS = 6 };       /* of an Out */
static const char *const texts[NAMES] = {
    "topic", "partition", "offset", "timestamp", "key", "value", "headers", "error",
};
static PyObject *names[NAMES]; /* of `texts` */
static const enum name record_fields[FIELDS] = {TOPIC, PARTITION, OFFSET, TIMESTAMP, KEY, VALUE, HEADERS};
static PyObject *empty, *zero, *minus_one, *end_of_time;
#define END_OF_TIME 253402300800000LL /* as in python.py */

/* ---- fields of Record and Out ------------------------------------------------------------------------------------ */

typedef struct {
    PyTypeObject *type; /* whose objects have the field at `offset` */
    Py_ssize_t offset;  /* 0: by name */
    PyObject *name;
    enum name which; /* NAMES: another name */
} Field;

static enum name which_of(PyObject *name) {
    int which = 0;
    while (which < NAMES && names[which] != name) which++;
    return which;
}

static Field field_of(PyTypeObject *type, PyObject *name) {
    Field field = {type, 0, name, which_of(name)};
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    if (found == NULL) {
        PyErr_Clear();
        return field;
    }
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type == T_OBJECT_EX) field.offset = member->offset;
    }
    Py_DECREF(found);
    return field;
}

static PyTypeObject fetched_type;
static PyObject *fetched_field(PyObject *fetched, enum name which);

static PyObject *get(const Field *field, PyObject *object) {
    if (field->offset && Py_IS_TYPE(object, field->type)) {
        PyObject *value = *(PyObject **)((char *)object + field->offset);
        if (value != NULL) return Py_NewRef(value);
    }
    if (Py_IS_TYPE(object, &fetched_type) && (int)field->which < FIELDS) return fetched_field(object, field->which);
    return PyObject_GetAttr(object, field->name);
}

/* ---- exceptions as values ---------------------------------------------------------------------------------------- */

/* The exception that is set, cleared; NULL, and it stays set, for one of another kind. */
static PyObject *caught(PyObject *kind) {
    if (!PyErr_ExceptionMatches(kind)) return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) PyException_SetTraceback(value, trace);
    Py_XDECREF(trace);
    Py_XDECREF(type);
    return value;
#endif
}

/* ---- records_of(messages, record_type, unreadable) -------------------------------------------------------------- */

typedef struct {
    PyTypeObject *type;      /* of messages that have these */
    PyCFunction call[NAMES]; /* NULL: by name */
    Py_ssize_t place[NAMES]; /* of the field in the message's memory; 0: the getter is asked */
} Getters;

static PyObject *ask(const Getters *getters, PyObject *message, enum name which) {
    if (getters->call[which] != NULL && Py_IS_TYPE(message, getters->type)) return getters->call[which](message, NULL);
    return PyObject_CallMethodNoArgs(message, names[which]);
}

/* The field as a Record has it: of the timestamp, the number alone. */
static PyObject *asked(const Getters *getters, PyObject *message, enum name which) {
    PyObject *answer = ask(getters, message, which);
    if (which != TIMESTAMP || answer == NULL) return answer;
    PyObject *timestamp = PySequence_GetItem(answer, 1);
    Py_DECREF(answer);
    return timestamp;
}

/* Calling the getters takes a third of the time of making a Record. So the fields of the client's own type are read
 * where a message keeps them, as long as each getter says the same of the first message that records_of is given. */

static long long long_at(const char *at) {
    long long number;
    memcpy(&number, at, sizeof(number));
    return number;
}

static int int_at(const char *at) {
    int number;
    memcpy(&number, at, sizeof(number));
    return number;
}

/* What is read at the field's place; NULL without an exception if the getter must be asked. */
static PyObject *read_field(const Getters *getters, PyObject *message, enum name which) {
    if (!getters->place[which] || !Py_IS_TYPE(message, getters->type)) return NULL;
    const char *at = (char *)message + getters->place[which];
    if (which == TIMESTAMP) return PyLong_FromLongLong(long_at(at));
    if (which == PARTITION || which == OFFSET) { /* of some negative numbers, the getters return None */
        long long number = which == OFFSET ? long_at(at) : int_at(at);
        return number < 0 ? NULL : PyLong_FromLongLong(number);
    }
    PyObject *object = *(PyObject **)at;
    return object != NULL ? Py_NewRef(object) : which == ERROR ? Py_NewRef(Py_None) : NULL;
}

static PyObject *field_in(const Getters *getters, PyObject *message, enum name which) {
    PyObject *value = read_field(getters, message, which);
    return value != NULL || PyErr_Occurred() ? value : asked(getters, message, which);
}

/* The only place at which these bytes are in a message; 0 if there is none. */
static Py_ssize_t only_place(PyObject *message, const void *bytes, size_t size) {
    Py_ssize_t found = 0, places = 0, last = Py_TYPE(message)->tp_basicsize - (Py_ssize_t)size;
    for (Py_ssize_t place = sizeof(PyObject); place <= last; place += sizeof(int)) {
        if (memcmp((char *)message + place, bytes, size) != 0) continue;
        found = place;
        places++;
    }
    return places == 1 ? found : 0;
}

/* Fill in the places of a message's fields; none of a type that cannot be called so. */
static void find_places(PyTypeObject *type, Py_ssize_t *place) {
    const int partition = 0x12345678; /* nothing else in the message is like these */
    const long long offset = 0x0123456789ABCDEF, timestamp = 0x0FEDCBA987654321;
    static const enum name objects[] = {TOPIC, KEY, VALUE, ERROR};
    PyObject *given[NAMES] = {NULL}, *message = NULL;
    for (size_t i = 0; i < COUNT_OF(objects); i++) given[objects[i]] = PyUnicode_FromFormat("a %s", texts[objects[i]]);
    PyObject *named = Py_BuildValue( /* which the objects belong to */
        "{sN sN sN sN si sL s(iL)}", texts[TOPIC], given[TOPIC], texts[KEY], given[KEY], texts[VALUE], given[VALUE],
        texts[ERROR], given[ERROR], texts[PARTITION], partition, texts[OFFSET], offset, texts[TIMESTAMP], 1, timestamp
    );
    if (named != NULL) message = PyObject_Call((PyObject *)type, empty, named);
    if (message != NULL) {
        for (size_t i = 0; i < COUNT_OF(objects); i++)
            place[objects[i]] = only_place(message, &given[objects[i]], sizeof(PyObject *));
        place[PARTITION] = only_place(message, &partition, sizeof(partition));
        place[OFFSET] = only_place(message, &offset, sizeof(offset));
        place[TIMESTAMP] = only_place(message, &timestamp, sizeof(timestamp));
    }
    Py_XDECREF(message);
    Py_XDECREF(named);
    PyErr_Clear();
}

/* Whether the getter says the same of this message as its memory (a later client's may do more than read it). */
static int is_confirmed(const Getters *getters, PyObject *message, enum name which) {
    PyObject *read = read_field(getters, message, which), *answer = asked(getters, message, which);
    int same = read == answer || (read == NULL && answer == Py_None);
    if (!same && read != NULL && answer != NULL && PyLong_CheckExact(read) && PyLong_CheckExact(answer))
        same = PyObject_RichCompareBool(read, answer, Py_EQ) > 0;
    Py_XDECREF(read);
    Py_XDECREF(answer);
    PyErr_Clear();
    return same;
}

static void set_places(Getters *getters, PyObject *message) {
    static PyTypeObject *measured; /* never freed: a type of C's own */
    static Py_ssize_t place[NAMES];
    if (measured != getters->type) {
        memset(place, 0, sizeof(place));
        find_places(getters->type, place);
        measured = getters->type;
    }
    memcpy(getters->place, place, sizeof(place));
    for (int i = 0; i < NAMES; i++)
        if (getters->place[i] && !is_confirmed(getters, message, i)) getters->place[i] = 0;
}

/* Whether it is defined in C and is this type's own, not inherited: then no code of Python's runs in making one. */
static int is_clients_own(PyTypeObject *type, PyObject *getter) {
    return !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) && PyDescr_TYPE(getter) == type;
}

static Getters getters_of(PyObject *message) {
    Getters getters = {Py_TYPE(message), {NULL}, {0}};
    int own = 0;
    for (int i = 0; i < NAMES; i++) {
        PyObject *found = PyObject_GetAttr((PyObject *)getters.type, names[i]);
        if (found == NULL) {
            PyErr_Clear();
        } else if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
            const PyMethodDef *method = ((PyMethodDescrObject *)found)->d_method;
            if (method->ml_flags == METH_NOARGS) getters.call[i] = method->ml_meth;
            own += getters.call[i] != NULL && is_clients_own(getters.type, found);
        }
        Py_XDECREF(found);
    }
    if (own == NAMES) set_places(&getters, message);
    return getters;
}

static PyObject *headers_of(const Getters *getters, PyObject *message, PyObject *unreadable) {
    PyObject *headers = ask(getters, message, HEADERS);
    if (PyErr_Occurred()) { /* confluent-kafka's getter may return a list all the same, which must not be read */
        Py_CLEAR(headers);
        PyObject *error = caught(PyExc_Exception);
        if (error == NULL) return NULL;
        headers = PyObject_CallFunctionObjArgs(unreadable, message, error, NULL);
        Py_DECREF(error);
        return headers;
    }
    if (headers == NULL) return NULL;
    int some = PyObject_IsTrue(headers);
    if (some > 0) return headers;
    Py_DECREF(headers);
    return some < 0 ? NULL : Py_NewRef(empty);
}

typedef struct {
    PyObject *type;
    int fills;            /* whether a record is made by filling `fields`; else the type is called */
    Field fields[FIELDS]; /* in the order of `names` */
} Maker;

/* Find the fields of these names. Return whether `made`, for which the type was called, is what filling them with these
 * values would have made. */
static int find_fields(
    PyTypeObject *type, PyObject *made, int count, const enum name *which, PyObject *const *values, Field *fields
) {
    if (!Py_IS_TYPE(made, type)) return 0;
    /* Classes of Python's own, which may do more in making one, are all seen by the collector; a Struct need not be. */
    if (PyType_IS_GC(type) || PyObject_HasAttrString((PyObject *)type, "__post_init__")) return 0;
    if (type->tp_alloc != PyType_GenericAlloc || type->tp_free != PyObject_Free) return 0;
    for (int i = 0; i < count; i++) {
        fields[i] = field_of(type, names[which[i]]);
        Py_ssize_t offset = fields[i].offset;
        if (!offset || *(PyObject **)((char *)made + offset) != values[i]) return 0;
    }
    return type->tp_basicsize == (Py_ssize_t)(sizeof(PyObject) + count * sizeof(PyObject *)); /* and no more fields */
}

static PyObject *filled(PyTypeObject *type, int count, const Field *fields, PyObject *const *values) {
    PyObject *made = PyObject_New(PyObject, type); /* not tp_alloc, which fills the memory with zeros first */
    for (int i = 0; made != NULL && i < count; i++)
        *(PyObject **)((char *)made + fields[i].offset) = Py_NewRef(values[i]);
    return made;
}

static PyObject *called(Maker *maker, PyObject *const *values) {
    PyObject *record = PyObject_Vectorcall(maker->type, values, FIELDS, NULL);
    maker->fills = record != NULL && PyType_Check(maker->type) &&
                   find_fields((PyTypeObject *)maker->type, record, FIELDS, record_fields, values, maker->fields);
    return record;
}

static PyObject *value_of(const Getters *getters, PyObject *message, enum name which, PyObject *unreadable) {
    if (which == HEADERS) return headers_of(getters, message, unreadable);
    return field_in(getters, message, which);
}

/* Replace a topic by the last record's, if they are equal. Each message has a string of its own, and so all records of
 * a topic have one, which `runs_of` compares faster. */
static void share(PyObject **topic, PyObject **last) {
    if (!PyUnicode_CheckExact(*topic)) return;
    if (*last != NULL && PyUnicode_Compare(*topic, *last) == 0) Py_SETREF(*topic, Py_NewRef(*last));
    else Py_XSETREF(*last, Py_NewRef(*topic));
}

static PyObject *record_of(
    const Getters *getters, PyObject *message, Maker *maker, PyObject *unreadable, PyObject **last_topic
) {
    PyObject *values[FIELDS], *record = NULL;
    int known = 0;
    while (known < FIELDS && (values[known] = value_of(getters, message, known, unreadable)) != NULL) known++;
    if (known == FIELDS) {
        share(&values[TOPIC], last_topic);
        if (!maker->fills) record = called(maker, values);
        else record = filled((PyTypeObject *)maker->type, FIELDS, maker->fields, values);
    }
    while (known) Py_DECREF(values[--known]);
    return record;
}

/* ---- fetched_of(messages, record_type, unreadable) -------------------------------------------------------------- */

/* Has the attributes of a Record, but leaves most of them in the client's message until they are asked for. */
typedef struct {
    PyObject_HEAD
    PyObject *message, *topic, *headers;
    long long offset;
    int partition;
} Fetched;

static Getters client; /* of the messages of the newest ones; a message of another type is read by name */

static PyObject *fetched_field(PyObject *self, enum name which) {
    const Fetched *fetched = (Fetched *)self;
    switch (which) {
    case TOPIC: return Py_NewRef(fetched->topic);
    case PARTITION: return PyLong_FromLong(fetched->partition);
    case OFFSET: return PyLong_FromLongLong(fetched->offset);
    case HEADERS: return Py_NewRef(fetched->headers);
    default: return field_in(&client, fetched->message, which);
    }
}

static PyObject *get_fetched(PyObject *self, void *which) { return fetched_field(self, *(const enum name *)which); }

static void free_fetched(PyObject *self) {
    Fetched *fetched = (Fetched *)self;
    Py_DECREF(fetched->message);
    Py_DECREF(fetched->topic);
    Py_DECREF(fetched->headers);
    PyObject_Free(self);
}

static PyGetSetDef fetched_attributes[FIELDS + 1]; /* filled when the module is made */
static PyTypeObject fetched_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "eos.hotloop._native.Fetched",
    .tp_basicsize = sizeof(Fetched),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = free_fetched,
    .tp_getset = fetched_attributes,
};

static int ready_fetched(void) {
    for (int i = 0; i < FIELDS; i++)
        fetched_attributes[i] = (PyGetSetDef){texts[i], get_fetched, NULL, NULL, (void *)&record_fields[i]};
    return PyType_Ready(&fetched_type);
}

/* NULL without an exception: the message's position is not at known places. */
static PyObject *fetched_from(PyObject *message, PyObject *unreadable, PyObject **last_topic) {
    if (!Py_IS_TYPE(message, client.type) || !client.place[OFFSET] || !client.place[PARTITION]) return NULL;
    long long offset = long_at((char *)message + client.place[OFFSET]);
    int partition = int_at((char *)message + client.place[PARTITION]);
    if (offset < 0 || partition < 0) return NULL;
    PyObject *headers = headers_of(&client, message, unreadable), *topic = NULL;
    if (headers != NULL) topic = field_in(&client, message, TOPIC);
    Fetched *fetched = topic == NULL ? NULL : PyObject_New(Fetched, &fetched_type);
    if (fetched == NULL) {
        Py_XDECREF(headers);
        Py_XDECREF(topic);
        return NULL;
    }
    share(&topic, last_topic);
    fetched->message = Py_NewRef(message);
    fetched->topic = topic;
    fetched->headers = headers;
    fetched->offset = offset;
    fetched->partition = partition;
    return (PyObject *)fetched;
}

static PyObject *all_of(PyObject *const *args, Py_ssize_t count, int fetches) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "messages, a type and a function are needed");
    PyObject *messages = PySequence_Fast(args[0], "messages");
    if (messages == NULL) return NULL;
    PyObject *records = PyList_New(0);
    if (records == NULL || PySequence_Fast_GET_SIZE(messages) == 0) {
        Py_DECREF(messages);
        return records;
    }
    PyObject *first = Py_NewRef(PySequence_Fast_GET_ITEM(messages, 0)); /* keeps its type, which `getters` is about */
    PyObject *last_topic = NULL;
    const Getters getters = getters_of(first);
    if (fetches) client = getters;
    Maker maker = {args[1], 0, {{0}}};
    for (Py_ssize_t i = 0; records != NULL && i < PySequence_Fast_GET_SIZE(messages); i++) {
        PyObject *message = Py_NewRef(PySequence_Fast_GET_ITEM(messages, i));
        PyObject *error = field_in(&getters, message, ERROR);
        if (error == Py_None) {
            PyObject *record = fetches ? fetched_from(message, args[2], &last_topic) : NULL;
            if (record == NULL && !PyErr_Occurred())
                record = record_of(&getters, message, &maker, args[2], &last_topic);
            if (record == NULL || PyList_Append(records, record) < 0) Py_CLEAR(records);
            Py_XDECREF(record);
        } else if (error == NULL) {
            Py_CLEAR(records);
        }
        Py_XDECREF(error);
        Py_DECREF(message);
    }
    Py_XDECREF(last_topic);
    Py_DECREF(first);
    Py_DECREF(messages);
    return records;
}

static PyObject *records_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    return all_of(args, count, 0);
}

static PyObject *fetched_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    return all_of(args, count, 1);
}

/* ---- runs_of(records) -------------------------------------------------------------------------------------------- */

/* Whether `value`, which is taken over, is `*last`, which it becomes: 1, 0, or -1: raised. */
static int is_last(PyObject **last, PyObject *value) {
    if (value == NULL) return -1;
    int answer = *last == NULL ? 0 : *last == value ? 1 : PyObject_RichCompareBool(value, *last, Py_EQ);
    Py_XSETREF(*last, value);
    return answer;
}

/* `value`, which is taken over, as a number: 0, or -1: raised. */
static int number_of(PyObject *value, long long *number) {
    if (value == NULL) return -1;
    *number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether one fetched record continues the run of another; 0 also if they are of other types. */
static int continues(PyObject *before, PyObject *record) {
    if (!Py_IS_TYPE(before, &fetched_type) || !Py_IS_TYPE(record, &fetched_type)) return 0;
    const Fetched *one = (Fetched *)before, *two = (Fetched *)record;
    return one->topic == two->topic && one->partition == two->partition && one->offset < two->offset;
}

static PyObject *runs_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 1 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "runs_of takes a list");
    PyObject *records = args[0], *runs = PyList_New(0), *topic = NULL, *partition = NULL;
    long long last = 0;
    if (runs == NULL || !PyList_GET_SIZE(records)) return runs;
    PyTypeObject *type = Py_TYPE(PyList_GET_ITEM(records, 0));
    const Field topics = field_of(type, names[TOPIC]), partitions = field_of(type, names[PARTITION]);
    const Field offsets = field_of(type, names[OFFSET]);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records) && runs != NULL; i++) {
        if (i && continues(PyList_GET_ITEM(records, i - 1), PyList_GET_ITEM(records, i))) {
            last = ((Fetched *)PyList_GET_ITEM(records, i))->offset;
            continue;
        }
        PyObject *record = Py_NewRef(PyList_GET_ITEM(records, i));
        int same_topic = is_last(&topic, get(&topics, record));
        int same_partition = same_topic < 0 ? -1 : is_last(&partition, get(&partitions, record));
        long long before = last;
        int known = same_partition < 0 ? -1 : number_of(get(&offsets, record), &last);
        Py_DECREF(record);
        if (same_topic > 0 && same_partition > 0 && known >= 0 && last > before) continue;
        PyObject *at = known < 0 ? NULL : PyLong_FromSsize_t(i);
        if (at == NULL || PyList_Append(runs, at) < 0) Py_CLEAR(runs);
        Py_XDECREF(at);
    }
    Py_XDECREF(topic);
    Py_XDECREF(partition);
    return runs;
}

/* ---- headers ----------------------------------------------------------------------------------------------------- */

/* Return None and bytes unchanged, text as UTF-8, and everything else as `other` encodes it. */
static PyObject *text_of(PyObject *value, PyObject *other) {
    if (value == Py_None || PyBytes_CheckExact(value)) return Py_NewRef(value);
    if (PyUnicode_CheckExact(value)) return PyUnicode_AsUTF8String(value);
    return other == NULL ? NULL : PyObject_CallOneArg(other, value);
}

static PyObject *header_of(PyObject *name, PyObject *value) {
    Py_ssize_t length;
    const char *utf8 = PyUnicode_CheckExact(name) ? PyUnicode_AsUTF8AndSize(name, &length) : NULL; /* or it raises */
    int is_name = utf8 != NULL && memchr(utf8, 0, length) == NULL;
    PyObject *text = is_name ? text_of(value, NULL) : NULL, *header = NULL;
    Py_INCREF(name); /* making a tuple may run the collector, and with it anybody's code */
    if (text != NULL) header = PyTuple_Pack(2, name, text);
    Py_DECREF(name);
    Py_XDECREF(text);
    return header;
}

/* Takes `header` over. */
static PyObject *with_header(PyObject *list, PyObject *header) {
    if (header == NULL || PyList_Append(list, header) < 0) Py_CLEAR(list);
    Py_XDECREF(header);
    return list;
}

/* Return the headers of a list, a tuple or a mapping as a list of names and bytes. */
static PyObject *listed(PyObject *headers) {
    int is_dict = PyDict_CheckExact(headers);
    if (!is_dict && !PyList_CheckExact(headers) && !PyTuple_CheckExact(headers)) return NULL;
    PyObject *list = PyList_New(0), *name, *value;
    for (Py_ssize_t at = 0; is_dict && list != NULL && PyDict_Next(headers, &at, &name, &value);)
        list = with_header(list, header_of(name, value));
    for (Py_ssize_t i = 0; !is_dict && list != NULL && i < PySequence_Fast_GET_SIZE(headers); i++) {
        PyObject *pair = PySequence_Fast_GET_ITEM(headers, i);
        int fits = PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2;
        list = with_header(list, fits ? header_of(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)) : NULL);
    }
    return list;
}

/* ASCII without a zero byte: other text needs an encoding, which may fail, and the client ends text at a zero byte. */
static int is_plain_text(PyObject *text) {
    if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text)) return 0;
    return memchr(PyUnicode_1BYTE_DATA(text), 0, PyUnicode_GET_LENGTH(text)) == NULL;
}

/* Whether the client sends this header as `header_of` would make it. */
static int is_plain(PyObject *name, PyObject *value) {
    return is_plain_text(name) && (value == Py_None || PyBytes_CheckExact(value) || is_plain_text(value));
}

static int are_plain(PyObject *headers) {
    PyObject *name, *value;
    if (PyDict_CheckExact(headers)) {
        for (Py_ssize_t at = 0; PyDict_Next(headers, &at, &name, &value);)
            if (!is_plain(name, value)) return 0;
        return 1;
    }
    if (!PyList_CheckExact(headers)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(headers); i++) {
        PyObject *pair = PyList_GET_ITEM(headers, i);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) return 0;
        if (!is_plain(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1))) return 0;
    }
    return 1;
}

/* The headers of an Out for `produce`, as they are if the client takes them so. */
static PyObject *usual_headers(PyObject *headers) { return are_plain(headers) ? Py_NewRef(headers) : listed(headers); }

/* ---- producing --------------------------------------------------------------------------------------------------- */

/* How many arguments `produce` is given, always in a tuple: topic, value, key[, -1, None, None, timestamp[, headers]]. */
enum { SHORT = 3, LONG = 7, LONGEST = 8 };

static PyObject *send_of(PyObject *call) {
    PyObject *const *args = &PyTuple_GET_ITEM(call, 0);
    Py_ssize_t given = PyTuple_GET_SIZE(call);
    PyObject *partition = given == SHORT ? minus_one : args[3], *timestamp = given == SHORT ? zero : args[6];
    return PyTuple_Pack(6, args[0], args[1], args[2], partition, timestamp, given == LONGEST ? args[7] : Py_None);
}

/* Make the headers a list of names and bytes: only the client need take them as they are. -1: raised. */
static int list_headers(PyObject *call) {
    if (PyTuple_GET_SIZE(call) < LONGEST) return 0;
    PyObject *list = listed(PyTuple_GET_ITEM(call, LONGEST - 1));
    if (list != NULL) Py_SETREF(PyTuple_GET_ITEM(call, LONGEST - 1), list);
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the headers changed before they were sent");
    return list == NULL ? -1 : 0;
}

/* function(*call). The client's `produce`, which takes a tuple, is called as C: that saves a tenth of its time. */
static PyObject *called_with(PyObject *function, PyObject *call) {
    if (!PyCFunction_CheckExact(function) || PyCFunction_GET_FLAGS(function) != (METH_VARARGS | METH_KEYWORDS))
        return list_headers(call) < 0 ? NULL : PyObject_Call(function, call, NULL);
    PyCFunctionWithKeywords method = (PyCFunctionWithKeywords)(void (*)(void))PyCFunction_GET_FUNCTION(function);
    PyObject *result = method(PyCFunction_GET_SELF(function), call, NULL);
    if (result == NULL && !PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "no result and no exception");
    return result;
}

/* produce(*call); what it raises goes to refused(error, send). -1: raised. */
static int put(PyObject *produce, PyObject *refused, PyObject *call) {
    PyObject *result = called_with(produce, call);
    if (result == NULL) {
        PyObject *error = caught(PyExc_Exception);
        if (error == NULL) return -1;
        PyObject *send = list_headers(call) < 0 ? NULL : send_of(call);
        if (send != NULL) {
            result = PyObject_CallFunctionObjArgs(refused, error, send, NULL);
            Py_DECREF(send);
        }
        Py_DECREF(error);
    }
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Holds objects of one result. The next result uses the same memory. */
typedef struct {
    PyObject **object; /* `count` of them, owned */
    Py_ssize_t count, room;
} Objects;

/* Add an object, whose reference is taken over. Return -1 if that raised. */
static int add(Objects *objects, PyObject *object) {
    if (objects->count == objects->room) {
        Py_ssize_t room = 2 * objects->room + 8;
        PyObject **moved = PyMem_Realloc(objects->object, (size_t)room * sizeof(PyObject *));
        if (moved == NULL) {
            Py_DECREF(object);
            PyErr_NoMemory();
            return -1;
        }
        objects->object = moved;
        objects->room = room;
    }
    objects->object[objects->count++] = object;
    return 0;
}

static void drop(Objects *objects) {
    while (objects->count) Py_DECREF(objects->object[--objects->count]);
}

/* Add the items of a list, a tuple or a generator. Return -1 if that raised. */
static int add_all(Objects *objects, PyObject *several) {
    PyObject *item;
    if (PyList_CheckExact(several) || PyTuple_CheckExact(several)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(several); i++)
            if (add(objects, Py_NewRef(PySequence_Fast_GET_ITEM(several, i))) < 0) return -1;
        return 0;
    }
    while ((item = PyIter_Next(several)) != NULL)
        if (add(objects, item) < 0) return -1;
    return PyErr_Occurred() ? -1 : 0;
}

/* Put each call, then drop all. Add the number of outputs sent to `*sent`. Return -1 if a call raised. */
static int put_all(PyObject *produce, PyObject *refused, Objects *calls, Py_ssize_t *sent) {
    int done = 0;
    for (Py_ssize_t i = 0; i < calls->count && done == 0; i++) {
        done = put(produce, refused, calls->object[i]);
        *sent += done == 0;
    }
    drop(calls);
    return done;
}

/* ---- what is usual ----------------------------------------------------------------------------------------------- */

/* In the functions from here on: NULL and no exception is set: it is not usual, and the caller's caller is asked. */

typedef struct {
    PyObject *topic, *destinations, *passing, *out_type, *keep, *value_of, *key_of;
    PyObject *bare, *types; /* of `value_of`, each owned or NULL */
    PyObject *find_latest; /* returns the time of a batch; NULL where each output has its record's */
    PyObject *latest;      /* what it returned, owned; NULL before it was called */
    int none_is_usual;
    int known; /* whether the fields are */
    Field value, key, out_topic, headers, partition, timestamp;
} Target;

typedef struct {
    Field key, timestamp, value, headers;
} Input;

/* Return an attribute; NULL without an exception if the object has none. */
static PyObject *found_in(PyObject *object, const char *name) {
    PyObject *found = PyObject_GetAttrString(object, name);
    if (found == NULL) PyErr_Clear();
    return found;
}

/* -1: raised. */
static int target_of(PyObject *given, Target *target) {
    *target = (Target){0};
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a target is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(
            given, "OOOO!OOOp", &target->topic, &target->destinations, &target->passing, &PyType_Type, &target->out_type,
            &target->keep, &target->value_of, &target->key_of, &target->none_is_usual
        ))
        return -1;
    if (target->passing == Py_None) target->passing = NULL;
    target->bare = found_in(target->value_of, "bare");
    target->types = found_in(target->value_of, "types");
    if (target->types != NULL && !PyAnySet_CheckExact(target->types)) Py_CLEAR(target->types);
    return 0;
}

static void forget(Target *target) {
    Py_CLEAR(target->latest);
    Py_CLEAR(target->bare);
    Py_CLEAR(target->types);
}

static void know(Target *target) {
    if (target->known) return;
    PyTypeObject *type = (PyTypeObject *)target->out_type;
    target->value = field_of(type, names[VALUE]);
    target->key = field_of(type, names[KEY]);
    target->out_topic = field_of(type, names[TOPIC]);
    target->headers = field_of(type, names[HEADERS]);
    target->partition = field_of(type, names[PARTITION]);
    target->timestamp = field_of(type, names[TIMESTAMP]);
    target->known = 1;
}

/* Return a value as bytes or None. Call the bare encoder for values of its types. */
static PyObject *encoded(const Target *target, PyObject *value) {
    int is_bare = 0;
    if (target->bare != NULL && target->types != NULL && value != Py_None && !PyBytes_CheckExact(value) &&
        !PyUnicode_CheckExact(value))
        is_bare = PySet_Contains(target->types, (PyObject *)Py_TYPE(value));
    if (is_bare < 0) return NULL;
    PyObject *bytes = is_bare ? PyObject_CallOneArg(target->bare, value) : text_of(value, target->value_of);
    if (bytes != NULL || !is_bare || !PyErr_ExceptionMatches(PyExc_TypeError)) return bytes;
    PyErr_Clear();
    return PyObject_CallOneArg(target->value_of, value);
}

/* Whether a header of this name is among `own`, a list of pairs or NULL. -1: raised. */
static int is_given(PyObject *own, PyObject *name) {
    for (Py_ssize_t i = 0; own != NULL && i < PyList_GET_SIZE(own); i++) {
        int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(PyList_GET_ITEM(own, i), 0), name, Py_EQ);
        if (same) return same;
    }
    return 0;
}

/* Those of `headers` whose names are in `passing` and not among `own`, and these behind them: a list. Raises. */
static PyObject *passed_of(PyObject *headers, PyObject *passing, PyObject *own) {
    PyObject *pairs = PySequence_Fast(headers, "headers"), *passed = pairs == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; passed != NULL && i < PySequence_Fast_GET_SIZE(pairs); i++) {
        PyObject *pair = Py_NewRef(PySequence_Fast_GET_ITEM(pairs, i)), *name = PySequence_GetItem(pair, 0);
        int wanted = name == NULL ? -1 : PySequence_Contains(passing, name);
        int given = wanted > 0 ? is_given(own, name) : 0;
        if (wanted < 0 || given < 0 || (wanted && !given && PyList_Append(passed, pair) < 0)) Py_CLEAR(passed);
        Py_XDECREF(name);
        Py_DECREF(pair);
    }
    Py_XDECREF(pairs);
    Py_ssize_t end = passed == NULL ? 0 : PyList_GET_SIZE(passed);
    if (passed != NULL && own != NULL && PyList_SetSlice(passed, end, end, own) < 0) Py_CLEAR(passed);
    return passed;
}

/* An int from 0 to `last`. */
static int is_int(PyObject *value, long long last) {
    if (!PyLong_CheckExact(value)) return 0;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && number >= 0 && number <= last;
}

/* What an output is made of, each owned or NULL. */
typedef struct {
    PyObject *topic, *value, *key, *partition, *timestamp, *headers;
} Parts;

static void clear(Parts *parts) {
    Py_CLEAR(parts->topic);
    Py_CLEAR(parts->value);
    Py_CLEAR(parts->key);
    Py_CLEAR(parts->partition);
    Py_CLEAR(parts->timestamp);
    Py_CLEAR(parts->headers);
}

/* The fields of an Out as they are. -1: raised. */
static int taken_apart(Target *target, PyObject *out, Parts *parts) {
    know(target);
    if ((parts->topic = get(&target->out_topic, out)) == NULL || (parts->value = get(&target->value, out)) == NULL ||
        (parts->key = get(&target->key, out)) == NULL || (parts->partition = get(&target->partition, out)) == NULL ||
        (parts->timestamp = get(&target->timestamp, out)) == NULL ||
        (parts->headers = get(&target->headers, out)) == NULL)
        return -1;
    return 0;
}

/* The record's own time, or 0 for none; NULL: raised, or it is not usual. */
static PyObject *time_of(const Input *input, PyObject *record) {
    PyObject *timestamp = get(&input->timestamp, record);
    if (timestamp != NULL && is_int(timestamp, END_OF_TIME - 1)) return timestamp;
    int known = timestamp == NULL ? -1 : PyObject_RichCompareBool(timestamp, zero, Py_GT);
    int usual = known > 0 ? PyObject_RichCompareBool(timestamp, end_of_time, Py_LT) : 0;
    if (usual <= 0) Py_CLEAR(timestamp);
    return known == 0 ? Py_NewRef(zero) : timestamp;
}

/* Return the time of the batch, which is found once an output needs it. */
static PyObject *latest_of(Target *target) {
    if (target->latest == NULL) target->latest = PyObject_CallNoArgs(target->find_latest);
    return Py_XNewRef(target->latest);
}

/* -1: raised, or the output's own headers are not usual. */
static int add_passed(PyObject *headers, PyObject *passing, Parts *parts) {
    PyObject *own = parts->headers == NULL ? NULL : listed(parts->headers);
    if (own == NULL && parts->headers != NULL) return -1;
    Py_XSETREF(parts->headers, passed_of(headers, passing, own));
    Py_XDECREF(own);
    return parts->headers == NULL ? -1 : 0;
}

/* Adds what of the record's headers is passed on. -1: as above. */
static int pass_on(const Target *target, const Input *input, PyObject *record, Parts *parts) {
    if (target->passing == NULL || record == NULL) return 0;
    PyObject *headers = get(&input->headers, record);
    if (headers == NULL) return -1;
    int done = headers == empty ? 0 : add_passed(headers, target->passing, parts);
    Py_DECREF(headers);
    return done;
}

/* Each part of an Out in its usual form; 0: it has none, or raised. */
static int normalise(Target *target, const Input *input, PyObject *record, Parts *parts) {
    if (record == NULL && parts->key == target->keep) return 0;
    if (parts->topic == Py_None) {
        Py_SETREF(parts->topic, Py_NewRef(target->topic));
    } else if (parts->topic != target->topic) {
        if (!PyUnicode_CheckExact(parts->topic) || PySet_Contains(target->destinations, parts->topic) <= 0) return 0;
    }
    if (parts->partition == Py_None) Py_SETREF(parts->partition, Py_NewRef(minus_one));
    else if (!is_int(parts->partition, INT32_MAX)) return 0;
    if (parts->headers == empty) Py_CLEAR(parts->headers);
    if (parts->headers != NULL) {
        Py_SETREF(parts->headers, usual_headers(parts->headers));
        if (parts->headers == NULL) return 0;
    }
    Py_SETREF(parts->key, parts->key == target->keep ? get(&input->key, record) : text_of(parts->key, target->key_of));
    if (parts->key == NULL) return 0;
    if (parts->timestamp == target->keep)
        Py_SETREF(parts->timestamp, record == NULL ? latest_of(target) : time_of(input, record));
    if (parts->timestamp == NULL || !is_int(parts->timestamp, END_OF_TIME - 1)) return 0;
    if (pass_on(target, input, record, parts) < 0) return 0;
    Py_SETREF(parts->value, encoded(target, parts->value));
    return parts->value != NULL;
}

/* The same for a value that is no Out. */
static int value_alone(const Target *target, const Input *input, PyObject *record, PyObject *value, Parts *parts) {
    if (record == NULL) return 0;
    parts->topic = Py_NewRef(target->topic);
    parts->partition = Py_NewRef(minus_one);
    if ((parts->key = get(&input->key, record)) == NULL || (parts->timestamp = time_of(input, record)) == NULL ||
        pass_on(target, input, record, parts) < 0)
        return 0;
    parts->value = encoded(target, value);
    return parts->value != NULL;
}

/* The reference goes over to the tuple. */
static void move(PyObject *tuple, Py_ssize_t at, PyObject **part) {
    PyTuple_SET_ITEM(tuple, at, *part);
    *part = NULL;
}

static PyObject *packed(Parts *parts) {
    int some = parts->headers != NULL && PyObject_Size(parts->headers) > 0;
    int few = !some && parts->timestamp == zero && parts->partition == minus_one;
    PyObject *call = PyTuple_New(some ? LONGEST : few ? SHORT : LONG);
    if (call == NULL) return NULL;
    move(call, 0, &parts->topic);
    move(call, 1, &parts->value);
    move(call, 2, &parts->key);
    if (few) return call;
    move(call, 3, &parts->partition);
    PyTuple_SET_ITEM(call, 4, Py_NewRef(Py_None));
    PyTuple_SET_ITEM(call, 5, Py_NewRef(Py_None));
    move(call, 6, &parts->timestamp);
    if (some) move(call, 7, &parts->headers);
    return call;
}

/* What one item leads to; `record` NULL: of a batch, whose latest time alone can be kept. */
static PyObject *call_of(Target *target, const Input *input, PyObject *record, PyObject *item) {
    Parts parts = {NULL};
    int usual = 0;
    if (!Py_IS_TYPE(item, (PyTypeObject *)target->out_type)) usual = value_alone(target, input, record, item, &parts);
    else if (taken_apart(target, item, &parts) == 0) usual = normalise(target, input, record, &parts);
    PyObject *call = usual ? packed(&parts) : NULL;
    clear(&parts);
    return call;
}

/* Add the calls that these items lead to. Return -1 and add none if an item is not usual or raised. */
static int calls_of(Target *target, const Input *input, PyObject *record, const Objects *items, Objects *calls) {
    for (Py_ssize_t i = 0; i < items->count; i++) {
        if (items->object[i] == Py_None) continue;
        PyObject *call = call_of(target, input, record, items->object[i]);
        if (call == NULL || add(calls, call) < 0) {
            drop(calls);
            return -1;
        }
    }
    return 0;
}

/* ---- feed_values(records, function, decode, target, produce, refused, other) --------------------------------------- */

typedef struct {
    PyObject *function, *decode, *produce, *refused, *other;
    PyObject *bare; /* of `decode`, owned or NULL */
    int has_target;
    Target target;
    Input input;
    Objects items, calls; /* of the result at hand */
} Values;

static PyObject *decoded(const Values *to, PyObject *value) {
    if (to->bare != NULL && PyBytes_CheckExact(value)) {
        if (to->bare == (PyObject *)&PyBytes_Type) return Py_NewRef(value);
        PyObject *given = PyObject_CallOneArg(to->bare, value);
        if (given != NULL || !PyErr_ExceptionMatches(PyExc_Exception)) return given;
        PyErr_Clear(); /* the decoder itself raises an error that explains the problem */
    }
    return PyObject_CallOneArg(to->decode, value);
}

static PyObject *result_of(const Values *to, PyObject *record) {
    if (to->decode == Py_None) return PyObject_CallOneArg(to->function, record);
    PyObject *value = get(&to->input.value, record), *given = NULL, *result = NULL;
    if (value != NULL) given = decoded(to, value);
    Py_XDECREF(value);
    if (given != NULL) result = PyObject_CallOneArg(to->function, given);
    Py_XDECREF(given);
    return result;
}

/* -1: raised. */
static int is_tombstone(const Values *to, PyObject *record) {
    PyObject *value = get(&to->input.value, record);
    if (value == NULL) return -1;
    int answer = value == Py_None;
    Py_DECREF(value);
    return answer;
}

/* Of a key and a value, as other libraries return them: the caller has a hint for that. */
static int looks_like_a_pair(const Target *target, PyObject *items) {
    if (!PyTuple_CheckExact(items) || PyTuple_GET_SIZE(items) != 2) return 0;
    PyObject *key = PyTuple_GET_ITEM(items, 0);
    if (!PyUnicode_Check(key) && !PyBytes_Check(key)) return 0;
    return !Py_IS_TYPE(PyTuple_GET_ITEM(items, 1), (PyTypeObject *)target->out_type);
}

static int feed_other(const Values *to, PyObject *record, PyObject *result, Py_ssize_t *sent) {
    PyObject *number = PyObject_CallFunctionObjArgs(to->other, record, result, NULL);
    Py_ssize_t more = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    if (more == -1 && PyErr_Occurred()) return -1;
    *sent += more;
    return 0;
}

/* Return the result for `other`: a list of a generator's items, everything else as it is. */
static PyObject *for_other(const Values *to, PyObject *result) {
    if (!PyGen_CheckExact(result)) return Py_NewRef(result);
    PyObject *list = PyList_New(to->items.count);
    for (Py_ssize_t i = 0; list != NULL && i < to->items.count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(to->items.object[i]));
    return list;
}

static int feed_items(Values *to, PyObject *record, PyObject *result, Py_ssize_t *sent) {
    int unusual = looks_like_a_pair(&to->target, result) ? 1 : is_tombstone(to, record);
    if (!unusual && calls_of(&to->target, &to->input, record, &to->items, &to->calls) == 0)
        return put_all(to->produce, to->refused, &to->calls, sent);
    if (PyErr_Occurred()) return -1;
    PyObject *given = for_other(to, result);
    int done = given == NULL ? -1 : feed_other(to, record, given, sent);
    Py_XDECREF(given);
    return done;
}

static int feed_several(Values *to, PyObject *record, PyObject *result, Py_ssize_t *sent) {
    int done = add_all(&to->items, result) < 0 ? -1 : feed_items(to, record, result, sent);
    drop(&to->items);
    return done;
}

static int feed_one(Values *to, PyObject *record, PyObject *result, Py_ssize_t *sent) {
    PyObject *call = call_of(&to->target, &to->input, record, result);
    if (call == NULL) return PyErr_Occurred() ? -1 : feed_other(to, record, result, sent);
    int done = put(to->produce, to->refused, call);
    Py_DECREF(call);
    *sent += done == 0;
    return done;
}

static int feed_result(Values *to, PyObject *record, PyObject *result, Py_ssize_t *sent) {
    if (result == Py_None) {
        int unusual = to->has_target && !to->target.none_is_usual ? 1 : is_tombstone(to, record);
        return unusual <= 0 ? unusual : feed_other(to, record, result, sent);
    }
    if (!to->has_target) return feed_other(to, record, result, sent);
    if (PyList_CheckExact(result) || PyTuple_CheckExact(result) || PyGen_CheckExact(result))
        return feed_several(to, record, result, sent);
    int several = PyIter_Check(result) || PyList_Check(result) || PyTuple_Check(result);
    return several ? feed_other(to, record, result, sent) : feed_one(to, record, result, sent);
}

/* How many outputs the record has led to is added to `*sent`. -1: raised. */
static int feed_value(Values *to, PyObject *record, Py_ssize_t *sent) {
    PyObject *result = result_of(to, record);
    if (result == NULL) return -1;
    int done = feed_result(to, record, result, sent);
    Py_DECREF(result);
    return done;
}

static PyObject *feed_values(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 7) return PyErr_Format(PyExc_TypeError, "feed_values takes 7 arguments");
    Values to = {args[1], args[2], args[4], args[5], args[6], NULL, args[3] != Py_None, {0}, {{0}}, {0}, {0}};
    if (to.has_target && target_of(args[3], &to.target) < 0) return NULL;
    PyObject *records = PySequence_Fast(args[0], "records");
    if (records == NULL) {
        forget(&to.target);
        return NULL;
    }
    if (to.decode != Py_None) to.bare = found_in(to.decode, "bare");
    if (PySequence_Fast_GET_SIZE(records)) {
        PyTypeObject *type = Py_TYPE(PySequence_Fast_GET_ITEM(records, 0));
        to.input.key = field_of(type, names[KEY]);
        to.input.timestamp = field_of(type, names[TIMESTAMP]);
        to.input.value = field_of(type, names[VALUE]);
        to.input.headers = field_of(type, names[HEADERS]);
    }
    Py_ssize_t sent = 0, i = 0;
    PyObject *error = NULL;
    for (; i < PySequence_Fast_GET_SIZE(records); i++) {
        PyObject *record = Py_NewRef(PySequence_Fast_GET_ITEM(records, i));
        int done = feed_value(&to, record, &sent);
        Py_DECREF(record);
        if (done < 0) {
            error = caught(PyExc_BaseException);
            break;
        }
    }
    Py_DECREF(records);
    Py_XDECREF(to.bare);
    forget(&to.target);
    PyMem_Free(to.items.object);
    PyMem_Free(to.calls.object);
    return error == NULL ? Py_BuildValue("nnO", sent, i, Py_None) : Py_BuildValue("nnN", sent, i, error);
}

/* ---- feed_outs(outs, target, find_latest, produce, refused) -------------------------------------------------------- */

static PyObject *feed_outs(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 5 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "feed_outs takes a list and 4 more");
    Target target;
    const Input none = {{0}};
    if (target_of(args[1], &target) < 0) return NULL;
    target.find_latest = args[2];
    Objects items = {0}, calls = {0};
    int usual = add_all(&items, args[0]) == 0 && calls_of(&target, &none, NULL, &items, &calls) == 0;
    Py_ssize_t sent = 0;
    int done = usual ? put_all(args[3], args[4], &calls, &sent) : -1;
    drop(&items);
    PyMem_Free(items.object);
    PyMem_Free(calls.object);
    forget(&target);
    if (!usual) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (done == 0) return Py_BuildValue("nO", sent, Py_None);
    PyObject *error = caught(PyExc_Exception);
    return error == NULL ? NULL : Py_BuildValue("nN", sent, error);
}

/* Call the method that a compiled one stands for. */
static PyObject *plainly(PyObject *method, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    Py_ssize_t all = count + (keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords));
    PyObject **given = PyMem_Malloc((size_t)(all + 1) * sizeof(PyObject *));
    if (given == NULL) return PyErr_NoMemory();
    given[0] = self;
    for (Py_ssize_t i = 0; i < all; i++) given[i + 1] = args[i];
    PyObject *result = PyObject_Vectorcall(method, given, (size_t)count + 1, keywords);
    PyMem_Free(given);
    return result;
}

/* ---- fast_out(method, record_type, out_type, keep) ---------------------------------------------------------------- */

/* Record.out for a value alone, which fills the fields of an Out. Everything else goes to the method itself. */
static struct {
    PyObject *method, *keep;
    PyTypeObject *type;       /* Out */
    Field key, timestamp;     /* of a Record */
    Field fields[OUT_FIELDS]; /* of an Out */
} out;

static PyObject *record_out(PyObject *record, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    if (count != 1 || keywords != NULL) return plainly(out.method, record, args, count, keywords);
    PyObject *timestamp = get(&out.timestamp, record), *key = NULL, *made = NULL;
    if (timestamp != NULL && !is_int(timestamp, END_OF_TIME)) {
        Py_DECREF(timestamp);
        return plainly(out.method, record, args, count, keywords);
    }
    if (timestamp != NULL && (key = get(&out.key, record)) != NULL) {
        PyObject *const values[OUT_FIELDS] = {args[0], key, Py_None, empty, Py_None, timestamp};
        made = filled(out.type, OUT_FIELDS, out.fields, values);
    }
    Py_XDECREF(timestamp);
    Py_XDECREF(key);
    return made;
}

/* What inspect.signature() reads. It knows no KEEP. */
#define OUT_SIGNATURE "out($self, value, key=..., topic=None, headers=(), partition=None)\n--\n\n"
static PyMethodDef out_definition = {"out", (PyCFunction)(void (*)(void))record_out, METH_FASTCALL | METH_KEYWORDS, NULL};

/* The module has one such method, because the offsets are those of one class. */
static PyObject *fast_out(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    if (count != 4 || !PyType_Check(args[1]) || !PyType_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "fast_out takes a method, two types and a marker");
    if (out.method != NULL) return Py_NewRef(args[0]);
    out.type = (PyTypeObject *)args[2];
    out.keep = args[3];
    PyObject *made = PyObject_CallOneArg(args[2], zero);
    if (made == NULL) return NULL;
    static const enum name which[OUT_FIELDS] = {VALUE, KEY, TOPIC, HEADERS, PARTITION, TIMESTAMP};
    PyObject *const values[OUT_FIELDS] = {zero, out.keep, Py_None, empty, Py_None, out.keep};
    int fills = find_fields(out.type, made, OUT_FIELDS, which, values, out.fields);
    Py_DECREF(made);
    if (!fills) return Py_NewRef(args[0]);
    out.key = field_of((PyTypeObject *)args[1], names[KEY]);
    out.timestamp = field_of((PyTypeObject *)args[1], names[TIMESTAMP]);
    PyObject *text = PyObject_GetAttrString(args[0], "__doc__"), *shown = NULL;
    if (text != NULL) shown = PyUnicode_FromFormat("%s%U", OUT_SIGNATURE, text); /* kept, as its text is the method's */
    if (shown != NULL) out_definition.ml_doc = PyUnicode_AsUTF8(shown);
    Py_XDECREF(text);
    if (PyErr_Occurred()) return NULL;
    Py_INCREF(args[2]);
    Py_INCREF(args[3]);
    out.method = Py_NewRef(args[0]);
    return PyDescr_NewMethod((PyTypeObject *)args[1], &out_definition);
}

/* ---- encode_key(key) --------------------------------------------------------------------------------------------- */

static PyObject *encode_key(PyObject *Py_UNUSED(self), PyObject *key) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(key, &bytes, &length) < 0) return NULL;
    if (length > UINT32_MAX) return PyErr_Format(PyExc_OverflowError, "a key of %zd bytes", length);
    PyObject *encoded = PyBytes_FromStringAndSize(NULL, length + 4);
    if (encoded == NULL) return NULL;
    char *to = PyBytes_AS_STRING(encoded);
    for (int i = 0; i < 4; i++) to[i] = (char)(length >> (24 - 8 * i));
    memcpy(to + 4, bytes, (size_t)length);
    return encoded;
}

/* ---- fast_state(state_type, store_type, unread, absent, immutable) ------------------------------------------------ */

/* A subclass of State whose methods read and fill the slots of State at their offsets. They handle an open state with a
 * value of the exact type and without changed defaults, and leave everything else, errors included, to State's own. */

enum { COMPILED, CELLS, ROW, CONTENT, BEFORE, AFTER, DEFAULTS, SLOTS };
static const char *const slot_texts[SLOTS] = {
    "_compiled", "_cells", "_row", "_value", "_bytes_before", "_bytes_after", "_defaults",
};
static struct {
    Py_ssize_t offset[SLOTS];
    Field begin, bare, encode, exact_type, renews; /* of a CompiledStore */
    PyObject *get, *set, *encode_all, *write;      /* of State */
    PyObject *unread, *absent, *immutable;
    PyObject *get_name, *put_name;
} state;

static PyObject **slot(PyObject *self, int which) { return (PyObject **)((char *)self + state.offset[which]); }

/* Fill a slot with `value`, whose reference is taken over. */
static void fill(PyObject *self, int which, PyObject *value) { Py_XSETREF(*slot(self, which), value); }

static int init_state(PyObject *self, PyObject *args, PyObject *named) {
    PyObject *compiled, *cells, *rest;
    if (named != NULL && PyDict_GET_SIZE(named)) {
        PyErr_SetString(PyExc_TypeError, "a state takes no named arguments");
        return -1;
    }
    if (!PyArg_UnpackTuple(args, "State", 3, 3, &compiled, &cells, &rest)) return -1;
    PyObject *row = get(&state.begin, compiled);
    if (row == NULL) return -1;
    if (!PyBytes_CheckExact(row) || !PyBytes_CheckExact(rest)) {
        Py_DECREF(row);
        PyErr_SetString(PyExc_TypeError, "the name of a row is bytes");
        return -1;
    }
    PyBytes_Concat(&row, rest);
    if (row == NULL) return -1;
    fill(self, COMPILED, Py_NewRef(compiled));
    fill(self, CELLS, Py_NewRef(cells));
    fill(self, ROW, row);
    fill(self, CONTENT, Py_NewRef(state.unread));
    fill(self, BEFORE, Py_NewRef(state.unread));
    fill(self, DEFAULTS, Py_NewRef(Py_None));
    return 0;
}

static int is_open(PyObject *self) {
    PyObject *cells = *slot(self, CELLS);
    return cells != NULL && cells != Py_None && *slot(self, COMPILED) != NULL && *slot(self, ROW) != NULL &&
           *slot(self, CONTENT) != NULL && *slot(self, BEFORE) != NULL && *slot(self, DEFAULTS) == Py_None;
}

/* Read the stored value. Return 0 if State's own method must read it, -1 if that raised. */
static int read_state(PyObject *self) {
    PyObject *bare = get(&state.bare, *slot(self, COMPILED)), *kept = NULL, *value = NULL;
    if (bare == NULL) return -1;
    int answer = 0;
    if (bare != Py_None) {
        PyObject *cells = Py_NewRef(*slot(self, CELLS)), *row = Py_NewRef(*slot(self, ROW));
        kept = PyObject_CallMethodOneArg(cells, state.get_name, row);
        Py_DECREF(cells);
        Py_DECREF(row);
        if (kept == NULL) answer = -1;
        else if (kept == Py_None) value = Py_NewRef(state.absent);
        else if (PyBytes_CheckExact(kept) && (value = PyObject_CallOneArg(bare, kept)) == NULL) {
            if (PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(); /* State's own method explains the problem */
            else answer = -1;
        }
    }
    if (value != NULL) {
        fill(self, CONTENT, value);
        fill(self, BEFORE, Py_NewRef(kept));
        answer = 1;
    }
    Py_XDECREF(kept);
    Py_DECREF(bare);
    return answer;
}

static PyObject *get_state(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    int known = keywords == NULL && count <= 1 && is_open(self);
    if (known && *slot(self, CONTENT) == state.unread) known = read_state(self);
    if (known < 0) return NULL;
    PyObject *value = known ? *slot(self, CONTENT) : NULL;
    if (value != NULL && value != state.absent) return Py_NewRef(value);
    PyObject *otherwise = count ? args[0] : Py_None;
    int fixed = value == NULL ? 0 : PySet_Contains(state.immutable, (PyObject *)Py_TYPE(otherwise));
    if (fixed < 0) return NULL;
    return fixed ? Py_NewRef(otherwise) : plainly(state.get, self, args, count, keywords);
}

static PyObject *set_state(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    if (keywords != NULL || count != 1 || args[0] == Py_None || !is_open(self))
        return plainly(state.set, self, args, count, keywords);
    PyObject *renews = get(&state.renews, *slot(self, COMPILED));
    if (renews == NULL) return NULL;
    fill(self, CONTENT, Py_NewRef(args[0]));
    if (renews == Py_True) fill(self, BEFORE, Py_NewRef(state.unread));
    Py_DECREF(renews);
    Py_RETURN_NONE;
}

/* Return the value's bytes, unread, or None for an absent value; NULL without an exception: State's own method must
 * encode it. */
static PyObject *encoded_state(PyObject *self) {
    PyObject *value = *slot(self, CONTENT), *compiled = *slot(self, COMPILED), *bytes = NULL;
    if (value == state.unread) return Py_NewRef(value);
    if (value == state.absent) return Py_NewRef(Py_None);
    PyObject *exact = get(&state.exact_type, compiled);
    PyObject *encode = exact == (PyObject *)Py_TYPE(value) ? get(&state.encode, compiled) : NULL;
    if (encode != NULL) {
        Py_INCREF(value);
        bytes = PyObject_CallOneArg(encode, value);
        Py_DECREF(value);
    }
    if (bytes == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    Py_XDECREF(encode);
    Py_XDECREF(exact);
    return bytes;
}

static PyObject *encode_state(PyObject *self, PyObject *Py_UNUSED(none)) {
    PyObject *bytes = is_open(self) ? encoded_state(self) : NULL;
    if (bytes == NULL) return PyErr_Occurred() ? NULL : PyObject_CallOneArg(state.encode_all, self);
    fill(self, AFTER, bytes);
    Py_RETURN_NONE;
}

static PyObject *write_state(PyObject *self, PyObject *cells) {
    PyObject *row = *slot(self, ROW), *before = *slot(self, BEFORE), *after = *slot(self, AFTER);
    if (row == NULL || before == NULL || after == NULL)
        return PyObject_CallFunctionObjArgs(state.write, self, cells, NULL);
    Py_INCREF(row);
    Py_INCREF(before);
    Py_INCREF(after);
    int changed = PyObject_RichCompareBool(after, before, Py_NE);
    PyObject *const given[] = {cells, row, after};
    PyObject *done = changed <= 0 ? NULL : PyObject_VectorcallMethod(state.put_name, given, 3, NULL);
    Py_DECREF(row);
    Py_DECREF(before);
    Py_DECREF(after);
    if (changed < 0 || (changed && done == NULL)) return NULL;
    Py_XDECREF(done);
    Py_RETURN_NONE;
}

static PyObject *close_state(PyObject *self, PyObject *Py_UNUSED(none)) {
    fill(self, CELLS, Py_NewRef(Py_None));
    Py_RETURN_NONE;
}

static PyMethodDef state_methods[] = {
    {"get", (PyCFunction)(void (*)(void))get_state, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"set", (PyCFunction)(void (*)(void))set_state, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_encode", encode_state, METH_NOARGS, NULL},
    {"_write", write_state, METH_O, NULL},
    {"_close", close_state, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot state_slots[] = {{Py_tp_init, init_state}, {Py_tp_methods, state_methods}, {0, NULL}};
static PyType_Spec state_spec = {"eos.app.state.State", 0, 0, Py_TPFLAGS_DEFAULT, state_slots};

static Field field_named(PyObject *type, const char *text) {
    return field_of((PyTypeObject *)type, PyUnicode_InternFromString(text));
}

/* The module has one such type, because the offsets are those of one class. */
static PyObject *fast_state(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count) {
    static PyObject *made;
    if (count != 5 || !PyType_Check(args[0]) || !PyType_Check(args[1]) || !PyAnySet_CheckExact(args[4]))
        return PyErr_Format(PyExc_TypeError, "fast_state takes two types, two markers and a set of types");
    if (made != NULL) return Py_NewRef(args[0] == (PyObject *)((PyTypeObject *)made)->tp_base ? made : args[0]);
    for (int i = 0; i < SLOTS; i++)
        if ((state.offset[i] = field_named(args[0], slot_texts[i]).offset) == 0) return Py_NewRef(args[0]);
    state.begin = field_named(args[1], "begin");
    state.bare = field_named(args[1], "bare");
    state.encode = field_named(args[1], "encode");
    state.exact_type = field_named(args[1], "exact_type");
    state.renews = field_named(args[1], "renews");
    state.unread = Py_NewRef(args[2]);
    state.absent = Py_NewRef(args[3]);
    state.immutable = Py_NewRef(args[4]);
    state.get_name = PyUnicode_InternFromString("get");
    state.put_name = PyUnicode_InternFromString("put");
    state.get = PyObject_GetAttrString(args[0], "get");
    state.set = PyObject_GetAttrString(args[0], "set");
    state.encode_all = PyObject_GetAttrString(args[0], "_encode");
    state.write = PyObject_GetAttrString(args[0], "_write");
    if (PyErr_Occurred()) return NULL;
    return Py_XNewRef(made = PyType_FromSpecWithBases(&state_spec, args[0]));
}

/* ---- the module -------------------------------------------------------------------------------------------------- */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, "As in eos/hotloop/python.py."}
static PyMethodDef functions[] = {
    FUNCTION(records_of), FUNCTION(fetched_of), FUNCTION(runs_of), FUNCTION(feed_values), FUNCTION(feed_outs),
    FUNCTION(fast_out), FUNCTION(fast_state),
    {"encode_key", encode_key, METH_O, "As in eos/hotloop/python.py."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    for (int i = 0; i < NAMES; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return NULL;
    empty = PyTuple_New(0);
    zero = PyLong_FromLong(0);
    minus_one = PyLong_FromLong(-1);
    end_of_time = PyLong_FromLongLong(END_OF_TIME);
    if (empty == NULL || zero == NULL || minus_one == NULL || end_of_time == NULL) return NULL;
    if (ready_fetched() < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    PyObject *source = PyLong_FromLongLong(EOS_SOURCE); // of build.py: source.py's checksum of this file
    int added = source == NULL ? -1 : PyModule_AddObjectRef(made, "SOURCE", source);
    Py_XDECREF(source);
    if (added < 0) Py_CLEAR(made);
    return made;
}
