/* One Ascend device: its name, its properties, and the message of its last error. */
#include "device.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char product[64] = "";
static bool compiles_online;
int most_graphs;
static _Thread_local char said[1024];
static _Thread_local bool chosen;

void virtual_npu_product(const char *name, int online, int most) {
    snprintf(product, sizeof product, "%s", name);
    compiles_online = online;
    most_graphs = most;
}
void virtual_npu_say(const char *text) { snprintf(said, sizeof said, "%s", text); }

int refuse(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int start = snprintf(said, sizeof said, "virtual NPU: ");
    vsnprintf(said + start, sizeof said - start, format, arguments);
    va_end(arguments);
    return code;
}

const char *aclGetRecentErrMsg(void) {
    static _Thread_local char text[sizeof said];
    memcpy(text, said, sizeof said);
    said[0] = 0;
    return text;
}

/* Answers for everything that the wheel links to and that the virtual device does not have. */
int virtual_npu_missing(const char *name) {
    fprintf(stderr, "virtual NPU: %s is not part of it\n", name);
    return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s is not part of it", name);
}

aclError aclInit(const char *config) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
const char *aclrtGetSocName(void) { return product; }
aclError aclrtGetDeviceCount(uint32_t *count) { return *count = 1, ACL_SUCCESS; }
aclError aclrtResetDevice(int32_t device) { return ACL_SUCCESS; }

aclError aclrtSetDevice(int32_t device) {
    if (device != 0) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "device %d: there is only npu:0", device);
    chosen = true;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    if (!chosen) return ACL_ERROR_RT_CONTEXT_NULL; /* torch_npu asks to learn that it has to choose a device */
    *device = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) { return *context = said, ACL_SUCCESS; }
aclError aclrtSetCurrentContext(aclrtContext context) { return ACL_SUCCESS; }
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    return *can = 0, ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    *value = 24; /* the number of cores, the only attribute that torch_npu asks for */
    return ACL_SUCCESS;
}
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { return *value = 24, ACL_SUCCESS; }

int aclGetCompileopt(int option, char *value, size_t size) {
    return snprintf(value, size, compiles_online ? "enable" : "disable"), ACL_SUCCESS;
}
size_t aclGetCompileoptSize(int option) { return sizeof "disable"; }

int snprintf_s(char *to, size_t room, size_t count, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(to, count < room ? count + 1 : room, format, arguments);
    va_end(arguments);
    return length;
}
int vsnprintf_s(char *to, size_t room, size_t count, const char *format, va_list arguments) {
    return vsnprintf(to, count < room ? count + 1 : room, format, arguments);
}
int strcpy_s(char *to, size_t room, const char *from) { return snprintf(to, room, "%s", from), 0; }

/* These settings have no effect on a synchronous device. */
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t timeout) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) { return ACL_SUCCESS; }
static int64_t options[64];
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if (option < 0 || option >= 64)
        return refuse(ACL_ERROR_INVALID_PARAM, "there is no option %d", (int)option);
    return options[option] = value, ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    return aclrtSetSysParamOpt(option, value);
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    if (option < 0 || option >= 64)
        return refuse(ACL_ERROR_INVALID_PARAM, "there is no option %d", (int)option);
    return *value = options[option], ACL_SUCCESS;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) { return ACL_SUCCESS; }
int aclSetCompileopt(int option, const char *value) { return ACL_SUCCESS; }

/* The CANN that torch_npu 2.13.0 was made for, so that it takes its usual code paths. */
static const char version[] = "9.0.0";
aclError aclsysGetVersionStr(char *package, char *text) { return strcpy(text, version), ACL_SUCCESS; }
aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *answer) {
    memset(answer, 0, sizeof *answer);
    snprintf(answer->version, sizeof answer->version, "%s", version);
    snprintf(answer->majorVersion, sizeof answer->majorVersion, "9");
    snprintf(answer->minorVersion, sizeof answer->minorVersion, "0");
    snprintf(answer->releaseVersion, sizeof answer->releaseVersion, "0");
    return ACL_SUCCESS;
}
